/// One backward pass on one worker: which nodes of the local graph wait for how many gradients, and
/// when the whole job's pass is done.
///
/// The pass is a diffusing computation: gradients (and, before them in SMART mode, marks) travel
/// from the worker with the roots to others and may come back. Its end is found as Dijkstra and
/// Scholten do: the first message that sets an idle worker to work is answered when that worker has
/// nothing left to do and all its own messages have been answered; all further ones are answered at
/// once. When the worker with the roots is idle and answered, everything is. (E. W. Dijkstra, C. S.
/// Scholten: Termination detection for diffusing computations, 1980.)
///
/// Nodes are called here, not by torch's engine, which can begin a graph at its roots only; what it
/// does around a call (hooks, release of saved values, the check of shapes) is done likewise.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/rpc/autograd_context.h"

namespace muster::rpc {

/// What every message of a pass says first.
struct PassHead {
  std::int64_t context = 0;
  std::int64_t pass = 0;
  dist_autograd::Mode mode = dist_autograd::Mode::fast;
  bool retain_graph = false;
};

class AutogradPass : public std::enable_shared_from_this<AutogradPass> {
 public:
  using Done = std::function<void(std::exception_ptr)>;
  AutogradPass(std::shared_ptr<DistAutograd> autograd, std::shared_ptr<AutogradContext> context,
               const PassHead& head)
      : autograd_(std::move(autograd)), context_(std::move(context)), head_(head) {}

  /// On the worker with the roots: all phases, one after the other.
  void start(const std::vector<at::Tensor>& roots, Done done);
  /// Gradients of what `message` carried have come. `answered` tells their sender.
  void gradients(std::int64_t message, std::vector<at::Tensor> gradients, Done answered);
  /// The roots depend on what `message` carried.
  void mark(std::int64_t message, Done answered);
  /// Ends it here and, through here, everywhere else; `answered` gets the first trouble. The pass
  /// has been taken out of its context.
  void finish(Done answered);

 private:
  using Node = torch::autograd::Node;
  using NodeRef = decltype(torch::autograd::Edge::function);
  using Edges = torch::autograd::edge_list;
  using Lock = std::unique_lock<std::mutex>;
  struct State {
    NodeRef node;
    int waits = 0;  // for so many gradients
    bool begun = false;
    bool run = false;
    std::vector<at::Tensor> inputs;
  };
  struct Arrival {
    Edges edges;
    std::vector<at::Tensor> gradients;
  };

  // With the context's mutex held.
  Edges edges_of(std::int64_t message) const;
  void count(const Edges& entry);
  void prepare();
  void feed(const torch::autograd::Edge& edge, const at::Tensor& gradient);
  void walk(const Edges& entry, std::vector<std::pair<int, std::int64_t>>& found);
  void check_context(const ReceiveNode& node) const;
  void note_error(std::exception_ptr error);
  std::string blocked() const;

  /// Whether the caller's message is to be answered at once; else `answered` is kept.
  bool engage(Done& answered);
  /// Works until nothing is ready, unless another thread does; then looks whether this worker is
  /// done. Takes the lock and gives it up.
  void work(Lock lock);
  void settle(Lock lock);
  void run(State& state);
  void evaluate(Node& node, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs);
  void accumulate(Node& node, std::vector<at::Tensor> inputs);
  void send_gradients(const ReceiveNode& node, std::vector<at::Tensor> gradients);
  void send_marks(const std::vector<std::pair<int, std::int64_t>>& found);
  void tell(int to, Kind kind, const std::function<void(Value&, Passage&)>& fill, Done answered);

  const std::shared_ptr<DistAutograd> autograd_;
  const std::shared_ptr<AutogradContext> context_;
  const PassHead head_;

  // All below: the context's mutex.
  Done engaged_;
  int unanswered_ = 0;
  bool working_ = false;
  bool prepared_ = false;
  std::exception_ptr error_;
  Edges roots_;
  std::vector<Arrival> arrivals_;
  std::unordered_map<Node*, State> states_;
  std::multimap<std::uint64_t, State*> ready_;  // the youngest node last
  std::set<std::int64_t> marked_;
  std::map<Node*, NodeRef> walked_;  // and keeps them alive
  std::set<int> told_;
};

void put_head(ValueOutput& archive, const PassHead& head);
PassHead get_head(ValueInput& archive);

}  // namespace muster::rpc
