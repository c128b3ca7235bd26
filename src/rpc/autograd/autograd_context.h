// SPDX-License-Identifier: BSD-3-Clause
/// One worker's part of distributed autograd: its contexts and what calls record in them. Users see
/// `dist_autograd.h`.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/node.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "muster/dist_autograd.h"
#include "rpc/agent/agent.h"

namespace muster::rpc {

inline constexpr MessageKind kAutogradGradients = MessageKind::autograd_first;
inline constexpr MessageKind kAutogradWalk =
    static_cast<MessageKind>(static_cast<int>(MessageKind::autograd_first) + 1);
inline constexpr MessageKind kAutogradFinish =
    static_cast<MessageKind>(static_cast<int>(MessageKind::autograd_first) + 2);
inline constexpr MessageKind kAutogradRelease =
    static_cast<MessageKind>(static_cast<int>(MessageKind::autograd_first) + 3);

class AutogradPass;

/// Marks tensors received with a message; their gradients go back to the sender. Stock autograd
/// cannot run it.
struct ReceiveNode final : torch::autograd::Node {
  ReceiveNode(std::int64_t context, int from, std::int64_t message)
      : context(context), from(from), message(message) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "muster::rpc::ReceiveNode"; }
  const std::int64_t context;
  const int from;
  const std::int64_t message;
};

/// This worker's state of one context.
struct AutogradContext {
  explicit AutogradContext(std::int64_t id) : id(id) {}
  const std::int64_t id;
  std::mutex mutex;  // guards everything below and the passes
  // By message: edges that receive the gradients of its tensors.
  std::map<std::int64_t, torch::autograd::edge_list> sent;
  std::set<int> peers;  // workers that may know this context
  dist_autograd::Gradients gradients;
  std::map<std::int64_t, std::shared_ptr<AutogradPass>> passes;
};

class DistAutograd final : public Observer, public std::enable_shared_from_this<DistAutograd> {
 public:
  /// Installs the agent's handlers and this observer; call before the agent starts.
  static void install(const std::shared_ptr<Agent>& agent);
  static std::shared_ptr<DistAutograd> of(Agent& agent);
  explicit DistAutograd(Agent& agent)
      : agent_(agent.weak_from_this()),
        self_(agent.self().id()),
        workers_(static_cast<int>(agent.workers().size())) {}

  std::int64_t new_context();
  void release(std::int64_t id);
  /// Throws DistError if the context is unknown.
  std::shared_ptr<AutogradContext> find(std::int64_t id) const;
  /// `done` is called once, with the error or null, on any thread.
  void backward(std::int64_t id, const std::vector<at::Tensor>& roots, bool retain_graph,
                dist_autograd::Mode mode, std::function<void(std::exception_ptr)> done);
  std::shared_ptr<Agent> agent() const;
  int self() const { return self_; }
  std::size_t contexts() const;

  bool request_leaves(int to, RpcMessage& message) override;
  std::shared_ptr<RequestScope> request_arrives(int from, RpcMessage& message) override;
  void reply_leaves(int to, RpcMessage& message,
                    const std::shared_ptr<RequestScope>& scope) override;
  void reply_arrives(int from, RpcMessage& message) override;

 private:
  std::shared_ptr<AutogradContext> find_or_make(std::int64_t id);
  void record_send(AutogradContext& context, int to, RpcMessage& message);
  std::shared_ptr<AutogradContext> record_receive(int from, RpcMessage& message, bool make);
  void on_gradients(const Request& request);
  void on_walk(const Request& request);
  void on_finish(const Request& request);
  void on_release(const Request& request);
  void on_loss(int worker);

  std::weak_ptr<Agent> agent_;
  const int self_;
  const int workers_;
  mutable std::mutex mutex_;  // guards the following; never held together with a context's
  std::map<std::int64_t, std::shared_ptr<AutogradContext>> contexts_;
  std::set<std::int64_t> released_;  // most recently released; late messages do not recreate them
  std::deque<std::int64_t> released_order_;
  std::int64_t next_ = 1;  // next id of contexts, messages and passes
  friend class AutogradPass;
};

/// Wraps `task` to run in the calling thread's context.
std::function<void()> keep_autograd_context(std::function<void()> task);
/// The owner's side of RRef::backward.
void serve_rref_backward(const Request& request);

}  // namespace muster::rpc
