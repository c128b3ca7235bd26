// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/autograd/autograd_pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "core/group/errors.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent.h"

namespace muster::rpc {

namespace autograd = torch::autograd;
using dist_autograd::Mode;

void put_head(ValueOutput& archive, const PassHead& head) {
  archive(head.context);
  archive(head.pass);
  archive(static_cast<std::uint8_t>(head.mode));
  archive(head.retain_graph);
}

PassHead get_head(ValueInput& archive) {
  PassHead head;
  std::uint8_t mode = 0;
  archive(head.context);
  archive(head.pass);
  archive(mode);
  archive(head.retain_graph);
  head.mode = mode == 0 ? Mode::fast : Mode::smart;
  return head;
}

void AutogradPass::start(const std::vector<at::Tensor>& roots, Done done) {
  GradientArrival arrival;
  for (const at::Tensor& root : roots) {
    arrival.edges.push_back(autograd::impl::gradient_edge(root));
    arrival.gradients.push_back(at::ones_like(root));
  }
  // The phases, last one first. Each begins when the previous one has finished on all workers.
  Done finished = [self = shared_from_this(), done](std::exception_ptr error) {
    {
      const Lock lock(self->context_->mutex);
      self->context_->passes.erase(self->head_.pass);
    }
    self->finish([done, error](std::exception_ptr trouble) { done(error ? error : trouble); });
  };
  Done run = [self = shared_from_this(), finished, arrival](std::exception_ptr error) {
    if (error) return finished(error);
    Lock lock(self->context_->mutex);
    Done answered = finished;
    self->engage(answered);
    self->arrivals_.push_back(arrival);
    self->work(std::move(lock));
  };
  Lock lock(context_->mutex);
  roots_ = arrival.edges;
  if (head_.mode == Mode::fast) {
    lock.unlock();
    return run(nullptr);
  }
  // The thread that receives the last answer must not run the backward functions itself.
  Done marked = [self = shared_from_this(), run](std::exception_ptr error) {
    if (!self->autograd_->agent()->run_later([run, error] { run(error); }))
      run(std::make_exception_ptr(DistError("RPC has been shut down", Code::closed)));
  };
  engage(marked);
  std::vector<std::pair<int, std::int64_t>> found;
  try {
    walk(roots_, found);
  } catch (...) {
    note_error(std::current_exception());
  }
  ++unanswered_;  // keeps the phase open until all marks have been sent
  lock.unlock();
  send_marks(found);
  lock.lock();
  --unanswered_;
  settle(std::move(lock));
}

void AutogradPass::gradients(std::int64_t message, std::vector<at::Tensor> gradients,
                             Done answered) {
  Lock lock(context_->mutex);
  const bool at_once = engage(answered);
  try {
    GradientArrival arrival{edges_of(message), std::move(gradients)};
    if (arrival.gradients.size() != arrival.edges.size())
      throw DistError(
          "a message of distributed autograd has another number of gradients than were sent");
    const at::NoGradGuard no_grad;
    autograd::validate_outputs(arrival.edges, arrival.gradients, [](const std::string& text) {
      return "a gradient that came from another worker is invalid: " + text;
    });
    arrivals_.push_back(std::move(arrival));
  } catch (...) {
    note_error(std::current_exception());
  }
  if (at_once) {
    lock.unlock();
    answered(nullptr);
    lock.lock();
  }
  work(std::move(lock));
}

void AutogradPass::mark(std::int64_t message, Done answered) {
  Lock lock(context_->mutex);
  const bool at_once = engage(answered);
  std::vector<std::pair<int, std::int64_t>> found;
  try {
    if (marked_.insert(message).second) walk(edges_of(message), found);
  } catch (...) {
    note_error(std::current_exception());
  }
  ++unanswered_;
  lock.unlock();
  if (at_once) answered(nullptr);
  send_marks(found);
  lock.lock();
  --unanswered_;
  settle(std::move(lock));
}

void AutogradPass::finish(Done answered) {
  Lock lock(context_->mutex);
  struct Replies {
    std::mutex mutex;
    std::size_t open;
    std::exception_ptr trouble;
  };
  auto replies = std::make_shared<Replies>();
  replies->open = told_.size() + 1;
  const auto reply = [replies, answered](std::exception_ptr trouble) {
    std::unique_lock own(replies->mutex);
    if (trouble && !replies->trouble) replies->trouble = trouble;
    if (--replies->open > 0) return;
    own.unlock();
    answered(replies->trouble);
  };
  const std::set<int> told = std::move(told_);
  const std::string text = error_ ? std::string() : blocked();
  states_.clear();
  ready_.clear();
  walked_.clear();
  lock.unlock();
  for (const int peer : told) {
    tell(
        peer, kAutogradFinish, [](Value&, ValueDelivery&) {}, reply);
  }
  reply(text.empty() ? nullptr : std::make_exception_ptr(DistError(text)));
}

AutogradPass::Edges AutogradPass::edges_of(std::int64_t message) const {
  const auto sent = context_->sent.find(message);
  if (sent == context_->sent.end())
    throw DistError(
        "distributed autograd: gradients came for a message that this worker has not sent in "
        "context " +
        std::to_string(context_->id));
  return sent->second;
}

// Each edge into a node is one gradient to wait for. A node reached for the first time is expanded
// in turn.
void AutogradPass::count(const Edges& entry) {
  std::vector<const Edges*> open{&entry};
  while (!open.empty()) {
    const Edges& edges = *open.back();
    open.pop_back();
    for (const autograd::Edge& edge : edges) {
      if (!edge.is_valid()) continue;
      State& state = states_[edge.function.get()];
      if (++state.waits > 1 || state.node) continue;
      state.node = edge.function;
      state.inputs.resize(edge.function->num_inputs());
      open.push_back(&edge.function->next_edges());
    }
  }
}

void AutogradPass::prepare() {
  if (std::exchange(prepared_, true)) return;
  count(roots_);
  for (const auto& [message, edges] : context_->sent) {
    if (head_.mode == Mode::fast || marked_.contains(message)) count(edges);
  }
}

void AutogradPass::feed(const autograd::Edge& edge, const at::Tensor& gradient) {
  if (!edge.is_valid()) return;
  const auto found = states_.find(edge.function.get());
  if (found == states_.end())
    throw DistError("distributed autograd: a tensor was sent while backward of its context ran");
  State& state = found->second;
  state.begun = true;
  if (gradient.defined()) {
    at::Tensor& input = state.inputs.at(edge.input_nr);
    input = input.defined() ? input + gradient : gradient;
  }
  if (--state.waits == 0) ready_.emplace(state.node->sequence_nr(), &state);
}

void AutogradPass::check_context(const ReceiveNode& node) const {
  if (node.context == context_->id) return;
  throw DistError("the roots depend on values that came by calls in another context: " +
                  std::to_string(node.context) + ", not " + std::to_string(context_->id));
}

// Collects the messages of other workers that the graph leads to.
void AutogradPass::walk(const Edges& entry, std::vector<std::pair<int, std::int64_t>>& found) {
  std::vector<const Edges*> open{&entry};
  while (!open.empty()) {
    const Edges& edges = *open.back();
    open.pop_back();
    for (const autograd::Edge& edge : edges) {
      if (!edge.is_valid() || !walked_.emplace(edge.function.get(), edge.function).second) continue;
      if (const auto* receive = dynamic_cast<const ReceiveNode*>(edge.function.get())) {
        check_context(*receive);
        found.emplace_back(receive->from, receive->message);
      }
      open.push_back(&edge.function->next_edges());
    }
  }
}

void AutogradPass::note_error(std::exception_ptr error) {
  if (!error_) error_ = std::move(error);
}

// Describes the nodes that received only some of their gradients and therefore never ran.
std::string AutogradPass::blocked() const {
  int waiting = 0;
  for (const auto& [node, state] : states_) waiting += state.begun && !state.run ? 1 : 0;
  if (waiting == 0) return {};
  return "backward in FAST mode: on worker '" + autograd_->agent()->self().name() + "' " +
         std::to_string(waiting) +
         " backward functions wait for gradients that never come, since some values that this "
         "context's calls sent are not used by the "
         "roots; "
         "use Mode::smart";
}

bool AutogradPass::engage(Done& answered) {
  if (engaged_) return true;
  engaged_ = std::move(answered);
  return false;
}

void AutogradPass::work(Lock lock) {
  // If it was set, another thread runs the nodes and will pick up the new gradients.
  if (std::exchange(working_, true)) return;
  const at::NoGradGuard no_grad;
  for (;;) {
    try {
      if (!error_) prepare();
      for (const GradientArrival& arrival : std::exchange(arrivals_, {})) {
        for (std::size_t i = 0; i < arrival.edges.size() && !error_; ++i)
          feed(arrival.edges[i], arrival.gradients[i]);
      }
    } catch (...) {
      note_error(std::current_exception());
    }
    if (error_ || ready_.empty()) break;
    const auto youngest = std::prev(ready_.end());
    State& state = *youngest->second;
    ready_.erase(youngest);
    state.run = true;
    std::vector<at::Tensor> inputs = std::move(state.inputs);
    const NodeRef node = state.node;
    std::vector<at::Tensor> outputs;
    lock.unlock();
    std::exception_ptr error;
    try {
      evaluate(*node, std::move(inputs), outputs);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) note_error(error);
    try {
      for (std::size_t i = 0; i < outputs.size() && !error_; ++i)
        feed(node->next_edge(i), outputs[i]);
    } catch (...) {
      note_error(std::current_exception());
    }
  }
  working_ = false;
  settle(std::move(lock));
}

/// Answers the message that engaged this worker once it is idle: no thread runs nodes, nothing that
/// has arrived is unread, and its own messages are answered. Releases the lock first.
void AutogradPass::settle(Lock lock) {
  if (working_ || unanswered_ > 0 || (!arrivals_.empty() && !error_) || !engaged_) return;
  const Done answered = std::exchange(engaged_, nullptr);
  const std::exception_ptr error = error_;
  lock.unlock();
  answered(error);
}

void AutogradPass::evaluate(Node& node, std::vector<at::Tensor> inputs,
                            std::vector<at::Tensor>& outputs) {
  for (const auto& hook : node.tensor_pre_hooks()) inputs = (*hook)(inputs);
  for (const auto& [index, hook] : node.retains_grad_hooks()) inputs = (*hook)(inputs);
  for (const auto& hook : node.pre_hooks()) inputs = (*hook)(inputs);
  if (const auto* receive = dynamic_cast<const ReceiveNode*>(&node))
    return send_gradients(*receive, std::move(inputs));
  if (dynamic_cast<autograd::AccumulateGrad*>(&node) != nullptr)
    return accumulate(node, std::move(inputs));
  const bool hooked = !node.post_hooks().empty();
  const std::vector<at::Tensor> before = hooked ? inputs : std::vector<at::Tensor>();
  if (!head_.retain_graph) node.will_release_variables();
  outputs = node(std::move(inputs));
  if (!head_.retain_graph) node.release_variables();
  if (outputs.size() > node.num_outputs()) {
    for (std::size_t i = node.num_outputs(); i < outputs.size(); ++i) {
      if (outputs[i].defined())
        throw DistError("function " + node.name() + " gave more gradients than it has inputs",
                        Code::internal);
    }
    outputs.resize(node.num_outputs());
  }
  autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& text) {
    return "function " + node.name() + " gave an invalid gradient: " + text;
  });
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, before);
}

// Accumulates into the context's gradients; the leaf's `grad` is not changed.
void AutogradPass::accumulate(Node& node, std::vector<at::Tensor> inputs) {
  at::Tensor gradient = inputs.empty() ? at::Tensor() : std::move(inputs[0]);
  if (!gradient.defined()) return;
  inputs.clear();
  // The context must own the gradient: one that others hold, or that aliases other memory, is
  // copied.
  const bool own = gradient.use_count() == 1 &&
                   (gradient.is_sparse() || gradient.is_non_overlapping_and_dense());
  if (!own) gradient = gradient.clone();
  const at::Tensor& leaf = static_cast<autograd::AccumulateGrad&>(node).variable;
  const Lock lock(context_->mutex);
  at::Tensor& sum = context_->gradients[leaf];
  sum = sum.defined() ? sum + gradient : gradient;
}

void AutogradPass::send_gradients(const ReceiveNode& node, std::vector<at::Tensor> gradients) {
  check_context(node);
  Lock lock(context_->mutex);
  if (node.from == autograd_->self()) {
    arrivals_.push_back({edges_of(node.message), std::move(gradients)});
    return;
  }
  lock.unlock();
  tell(
      node.from, kAutogradGradients,
      [&](Value& value, ValueDelivery& delivery) {
        ValueOutput archive(value, delivery);
        put_head(archive, head_);
        archive(node.message);
        archive(gradients);
      },
      nullptr);
}

void AutogradPass::send_marks(const std::vector<std::pair<int, std::int64_t>>& found) {
  for (const auto& [from, message] : found) {
    if (from == autograd_->self()) {
      mark(message, [](std::exception_ptr) {});
      continue;
    }
    tell(
        from, kAutogradWalk,
        [&, message = message](Value& value, ValueDelivery& delivery) {
          ValueOutput archive(value, delivery);
          put_head(archive, head_);
          archive(message);
        },
        nullptr);
  }
}

// Without `answered` the message is part of the diffusing computation.
void AutogradPass::tell(int to, MessageKind kind,
                        const std::function<void(Value&, ValueDelivery&)>& fill, Done answered) {
  const bool counted = answered == nullptr;
  Agent::OutgoingCall call;
  call.to = to;
  call.kind = kind;
  call.name = "backward";
  call.fill = fill;
  if (kind == kAutogradFinish) {
    call.fill = [this](Value& value, ValueDelivery& delivery) {
      ValueOutput archive(value, delivery);
      put_head(archive, head_);
    };
  }
  call.options.timeout =
      Duration::zero();  // no time limit: a backward pass may take long, and deaths are detected
  call.observed = false;
  if (counted) {
    const Lock lock(context_->mutex);
    ++unanswered_;
    told_.insert(to);
    answered = [self = shared_from_this()](std::exception_ptr error) {
      Lock own(self->context_->mutex);
      --self->unanswered_;
      if (error) self->note_error(error);
      self->settle(std::move(own));
    };
  }
  try {
    autograd_->agent()->call(std::move(call),
                             [answered](const Answer& answer) { answered(answer.error); });
  } catch (...) {
    answered(std::current_exception());
  }
}

}  // namespace muster::rpc
