// SPDX-License-Identifier: BSD-3-Clause
/// One backward pass on one worker: counts the gradients each node of the local graph waits for,
/// and detects when the job-wide pass is done.
///
/// The pass is a diffusing computation: gradients (and, before them in SMART mode, marks) go from
/// the root worker to others and may come back. Termination is detected with the Dijkstra-Scholten
/// algorithm. The first message that activates an idle worker is answered once that worker has
/// nothing left to do and all its own messages are answered; later messages are answered
/// immediately. When the root worker is idle and all its messages are answered, the pass is done.
/// (E. W. Dijkstra, C. S. Scholten: Termination detection for diffusing computations, 1980.)
///
/// Nodes are called here, not by torch's engine, which can only start a graph at its roots.
/// Everything the engine does around a call (hooks, release of saved values, shape checks) is
/// reproduced.
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

#include "rpc/autograd/autograd_context.h"

namespace muster::rpc {

/// The header of every message of a pass.
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

  /// On the root worker: runs all phases.
  void start(const std::vector<at::Tensor>& roots, Done done);
  /// Receives gradients of the tensors sent with `message`. `answered` notifies their sender.
  void gradients(std::int64_t message, std::vector<at::Tensor> gradients, Done answered);
  /// Marks that the roots depend on the tensors sent with `message`.
  void mark(std::int64_t message, Done answered);
  /// Ends the pass here and, transitively, on all other workers. `answered` receives the first
  /// error. The pass has been removed from its context.
  void finish(Done answered);

 private:
  using Node = torch::autograd::Node;
  using NodeRef = decltype(torch::autograd::Edge::function);
  using Edges = torch::autograd::edge_list;
  using Lock = std::unique_lock<std::mutex>;
  struct State {
    NodeRef node;
    int waits = 0;  // gradients it waits for
    bool begun = false;
    bool run = false;
    std::vector<at::Tensor> inputs;
  };
  struct GradientArrival {
    Edges edges;
    std::vector<at::Tensor> gradients;
  };

  // Require the context's mutex.
  Edges edges_of(std::int64_t message) const;
  void count(const Edges& entry);
  void prepare();
  void feed(const torch::autograd::Edge& edge, const at::Tensor& gradient);
  void walk(const Edges& entry, std::vector<std::pair<int, std::int64_t>>& found);
  void check_context(const ReceiveNode& node) const;
  void note_error(std::exception_ptr error);
  std::string blocked() const;

  /// Whether to answer the caller's message immediately; otherwise `answered` is kept.
  bool engage(Done& answered);
  /// Runs nodes until none is ready, unless another thread does; then checks whether this worker is
  /// done. Takes over the lock and releases it.
  void work(Lock lock);
  void settle(Lock lock);
  void run(State& state);
  void evaluate(Node& node, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs);
  void accumulate(Node& node, std::vector<at::Tensor> inputs);
  void send_gradients(const ReceiveNode& node, std::vector<at::Tensor> gradients);
  void send_marks(const std::vector<std::pair<int, std::int64_t>>& found);
  void tell(int to, MessageKind kind, const std::function<void(Value&, ValueDelivery&)>& fill,
            Done answered);

  const std::shared_ptr<DistAutograd> autograd_;
  const std::shared_ptr<AutogradContext> context_;
  const PassHead head_;

  // Guarded by the context's mutex.
  Done engaged_;
  int unanswered_ = 0;
  bool working_ = false;
  bool prepared_ = false;
  std::exception_ptr error_;
  Edges roots_;
  std::vector<GradientArrival> arrivals_;
  std::unordered_map<Node*, State> states_;
  std::multimap<std::uint64_t, State*> ready_;  // newest node last
  std::set<std::int64_t> marked_;
  std::map<Node*, NodeRef> walked_;  // keeps the nodes alive
  std::set<int> told_;
};

void put_head(ValueOutput& archive, const PassHead& head);
PassHead get_head(ValueInput& archive);

}  // namespace muster::rpc
