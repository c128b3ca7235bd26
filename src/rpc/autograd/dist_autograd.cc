// SPDX-License-Identifier: BSD-3-Clause
#include "muster/dist_autograd.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "core/group/errors.h"
#include "muster/rpc_calls.h"
#include "muster/rpc_future.h"
#include "muster/rref.h"
#include "rpc/agent/agent.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/autograd/autograd_pass.h"
#include "rpc/rref/rref_context.h"

namespace muster::rpc {
namespace {

namespace autograd = torch::autograd;

constexpr std::int64_t kNone = -1;
constexpr std::int64_t kNoMessage = 0;
constexpr int kWorkerShift = 40;             // ids: the worker, then its count
constexpr std::size_t kReleasedKept = 4096;  // limit: memory

thread_local std::int64_t thread_context = kNone;

class Current {
 public:
  explicit Current(std::int64_t id) : before_(std::exchange(thread_context, id)) {}
  ~Current() { thread_context = before_; }
  Current(const Current&) = delete;

 private:
  std::int64_t before_;
};

// Runs a request in the context that came with it.
struct CallScope final : Observer::RequestScope {
  explicit CallScope(std::shared_ptr<AutogradContext> c) : context(std::move(c)) {}
  void enter() override { before = std::exchange(thread_context, context->id); }
  void leave() override { thread_context = before; }
  std::shared_ptr<AutogradContext> context;
  std::int64_t before = kNone;
};

[[noreturn]] void unknown_context(std::int64_t id) {
  throw DistError("distributed autograd knows no context " + std::to_string(id) +
                  " on this worker: it has ended, or no call of it has come here");
}

std::string note_of(std::int64_t context, std::int64_t message) {
  ByteWriter out;
  return out.put(context).put(message).take();
}

AutogradPass::Done answer_to(ResponderRef responder) {
  return [responder = std::move(responder)](std::exception_ptr error) {
    if (!responder) return;
    if (error) return responder->fail(error);
    responder->reply([](Value&, ValueDelivery&) {});
  };
}

}  // namespace

autograd::variable_list ReceiveNode::apply(autograd::variable_list&&) {
  throw DistError(
      "backward through a value that came by RPC needs dist_autograd::backward(context, roots): "
      "its other half is on another worker");
}

void DistAutograd::install(const std::shared_ptr<Agent>& agent) {
  const auto self = of(*agent);
  const std::weak_ptr<DistAutograd> weak = self;
  const auto with = [weak](void (DistAutograd::*handle)(const Request&)) {
    return [weak, handle](const Request& request) {
      if (const auto strong = weak.lock()) (strong.get()->*handle)(request);
    };
  };
  agent->on(kAutogradGradients, {.run = with(&DistAutograd::on_gradients), .is_short = {}});
  agent->on(kAutogradWalk, {.run = with(&DistAutograd::on_walk), .is_short = {}});
  agent->on(kAutogradFinish, {.run = with(&DistAutograd::on_finish), .is_short = {}});
  agent->on(kAutogradRelease, {.run = with(&DistAutograd::on_release), .is_short = {}});
  agent->observe(self);
  agent->on_loss([weak](int worker, const Status&) {
    if (const auto strong = weak.lock()) strong->on_loss(worker);
  });
}

std::shared_ptr<DistAutograd> DistAutograd::of(Agent& agent) {
  return agent.companion<DistAutograd>([&] { return std::make_shared<DistAutograd>(agent); });
}

std::shared_ptr<Agent> DistAutograd::agent() const {
  if (auto agent = agent_.lock()) return agent;
  throw DistError("RPC has been shut down on this worker", Code::closed);
}

std::int64_t DistAutograd::new_context() {
  const std::lock_guard lock(mutex_);
  const std::int64_t id = (std::int64_t{self_} << kWorkerShift) + next_++;
  contexts_.emplace(id, std::make_shared<AutogradContext>(id));
  return id;
}

std::shared_ptr<AutogradContext> DistAutograd::find(std::int64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(id);
  if (found == contexts_.end()) unknown_context(id);
  return found->second;
}

std::shared_ptr<AutogradContext> DistAutograd::find_or_make(std::int64_t id) {
  const std::lock_guard lock(mutex_);
  if (released_.contains(id)) return nullptr;
  auto& context = contexts_[id];
  if (!context) context = std::make_shared<AutogradContext>(id);
  return context;
}

std::size_t DistAutograd::contexts() const {
  const std::lock_guard lock(mutex_);
  return contexts_.size();
}

// Releases the context here and, transitively, on every worker that exchanged messages in it.
void DistAutograd::release(std::int64_t id) {
  std::unique_lock lock(mutex_);
  auto found = contexts_.extract(id);
  if (found.empty()) return;
  released_.insert(id);
  released_order_.push_back(id);
  if (released_order_.size() > kReleasedKept) {
    released_.erase(released_order_.front());
    released_order_.pop_front();
  }
  lock.unlock();
  const auto context = std::move(found.mapped());
  std::unique_lock own(context->mutex);
  const auto passes = std::exchange(context->passes, {});  // failed passes hold the context
  const auto sent = std::exchange(context->sent, {});
  const std::set<int> peers = context->peers;
  own.unlock();
  const auto agent = agent_.lock();
  if (!agent || !agent->running()) return;
  for (const int peer : peers) {
    if (peer == self_) continue;
    Agent::OutgoingCall call;
    call.to = peer;
    call.kind = kAutogradRelease;
    call.observed = false;
    call.fill = [&](Value& value, ValueDelivery& delivery) { pack(value, delivery, id); };
    try {
      agent->post(std::move(call));
    } catch (const std::exception&) {
      // The agent has just ended.
    }
  }
}

void DistAutograd::on_loss(int worker) {
  std::vector<std::int64_t> orphans;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, context] : contexts_) {
      if (static_cast<int>(id >> kWorkerShift) == worker) orphans.push_back(id);
    }
  }
  for (const auto id : orphans) release(id);
}

// ---- what calls leave

void DistAutograd::record_send(AutogradContext& context, int to, RpcMessage& message) {
  autograd::edge_list edges;
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& tensor : message.value.tensors) {
      if (tensor.requires_grad()) edges.push_back(autograd::impl::gradient_edge(tensor));
    }
  }
  std::int64_t number = kNoMessage;
  if (!edges.empty()) {
    const std::lock_guard lock(mutex_);
    number = (std::int64_t{self_} << kWorkerShift) + next_++;
  } else {
    for (at::Tensor& tensor : message.value.tensors) tensor = tensor.detach();
  }
  const std::lock_guard lock(context.mutex);
  context.peers.insert(to);
  if (!edges.empty()) context.sent.emplace(number, std::move(edges));
  message.note = note_of(context.id, number);
}

std::shared_ptr<AutogradContext> DistAutograd::record_receive(int from, RpcMessage& message,
                                                              bool make) {
  if (message.note.empty()) return nullptr;
  ByteReader in(message.note);
  const auto id = in.get<std::int64_t>();
  const auto number = in.get<std::int64_t>();
  if (!in.at_end() || id < 0 || (id >> kWorkerShift) >= workers_)
    throw DistError(
        "a call's note for distributed autograd is malformed; do all workers run the same version?",
        Code::refused);
  std::shared_ptr<AutogradContext> context;
  if (make) {
    context = find_or_make(id);
  } else {
    const std::lock_guard lock(mutex_);
    const auto found = contexts_.find(id);
    if (found != contexts_.end()) context = found->second;
  }
  decltype(c10::make_intrusive<ReceiveNode>(id, from, number)) node;
  for (at::Tensor& tensor : message.value.tensors) {
    if (!tensor.requires_grad()) continue;
    tensor = tensor.detach();
    if (!context || number == kNoMessage) continue;
    if (!node) node = c10::make_intrusive<ReceiveNode>(id, from, number);
    autograd::set_history(tensor, node);
  }
  if (context) {
    const std::lock_guard lock(context->mutex);
    context->peers.insert(from);
  }
  return context;
}

bool DistAutograd::request_leaves(int to, RpcMessage& message) {
  if (thread_context == kNone) return false;
  record_send(*find(thread_context), to, message);
  return true;
}

std::shared_ptr<Observer::RequestScope> DistAutograd::request_arrives(int from,
                                                                      RpcMessage& message) {
  auto context = record_receive(from, message, true);
  return context ? std::make_shared<CallScope>(std::move(context)) : nullptr;
}

void DistAutograd::reply_leaves(int to, RpcMessage& message,
                                const std::shared_ptr<RequestScope>& scope) {
  if (scope) record_send(*static_cast<CallScope&>(*scope).context, to, message);
}

void DistAutograd::reply_arrives(int from, RpcMessage& message) {
  record_receive(from, message, false);
}

std::function<void()> keep_autograd_context(std::function<void()> task) {
  return [id = thread_context, task = std::move(task)] {
    const Current current(id);
    task();
  };
}

// ---- backward

void DistAutograd::backward(std::int64_t id, const std::vector<at::Tensor>& roots,
                            bool retain_graph, dist_autograd::Mode mode,
                            std::function<void(std::exception_ptr)> done) {
  const auto context = find(id);
  if (roots.empty()) throw DistError("dist_autograd::backward needs at least one root");
  for (const at::Tensor& root : roots) {
    if (!root.defined()) throw DistError("dist_autograd::backward: a root is undefined");
    if (root.numel() != 1) {
      throw DistError("dist_autograd::backward: roots are scalars; one has " +
                      std::to_string(root.numel()) + " elements: sum() it, or take its mean()");
    }
    if (!root.requires_grad())
      throw DistError(
          "dist_autograd::backward: a root does not require grad, nothing leads to it that does");
  }
  PassHead head{.context = id, .pass = 0, .mode = mode, .retain_graph = retain_graph};
  {
    const std::lock_guard lock(mutex_);
    head.pass = (std::int64_t{self_} << kWorkerShift) + next_++;
  }
  auto pass = std::make_shared<AutogradPass>(shared_from_this(), context, head);
  {
    const std::lock_guard lock(context->mutex);
    context->passes.emplace(head.pass, pass);
  }
  pass->start(roots, std::move(done));
}

namespace {

std::shared_ptr<AutogradPass> pass_of(const std::shared_ptr<DistAutograd>& autograd,
                                      const PassHead& head) {
  auto context = autograd->find(head.context);
  const std::lock_guard lock(context->mutex);
  auto& pass = context->passes[head.pass];
  if (!pass) pass = std::make_shared<AutogradPass>(autograd, context, head);
  return pass;
}

}  // namespace

void DistAutograd::on_gradients(const Request& request) {
  ValueInput archive(request.message.value, *request.delivery);
  const PassHead head = get_head(archive);
  std::int64_t message = 0;
  std::vector<at::Tensor> gradients;
  archive(message);
  archive(gradients);
  pass_of(shared_from_this(), head)
      ->gradients(message, std::move(gradients), answer_to(request.responder));
}

void DistAutograd::on_walk(const Request& request) {
  ValueInput archive(request.message.value, *request.delivery);
  const PassHead head = get_head(archive);
  std::int64_t message = 0;
  archive(message);
  pass_of(shared_from_this(), head)->mark(message, answer_to(request.responder));
}

void DistAutograd::on_finish(const Request& request) {
  ValueInput archive(request.message.value, *request.delivery);
  const PassHead head = get_head(archive);
  auto answered = answer_to(request.responder);
  std::shared_ptr<AutogradPass> pass;
  {
    std::unique_lock lock(mutex_);
    const auto found = contexts_.find(head.context);
    const auto context = found == contexts_.end() ? nullptr : found->second;
    lock.unlock();
    if (context) {
      const std::lock_guard own(context->mutex);
      if (auto entry = context->passes.extract(head.pass); !entry.empty())
        pass = std::move(entry.mapped());
    }
  }
  if (!pass) return answered(nullptr);
  pass->finish(std::move(answered));
}

void DistAutograd::on_release(const Request& request) {
  release(unpack<std::int64_t>(request.message.value, *request.delivery));
}

// ---- of RRefs

namespace {

// Runs on the owner. `done` may be called on any thread.
void backward_here(Agent& agent, const KeptValue& kept, std::int64_t context_id, bool retain_graph,
                   std::function<void(std::exception_ptr)> done) {
  if (*kept.type != typeid(at::Tensor)) detail::wrong_kept_type(*kept.type, typeid(at::Tensor));
  const at::Tensor& root = *std::static_pointer_cast<at::Tensor>(kept.object);
  if (context_id != kNone)
    return DistAutograd::of(agent)->backward(context_id, {root}, retain_graph,
                                             dist_autograd::Mode::fast, std::move(done));
  root.backward({}, retain_graph);
  done(nullptr);
}

}  // namespace

void serve_rref_backward(const Request& request) {
  ValueInput archive(request.message.value, *request.delivery);
  const RRefId rref = decode_rref(archive);
  std::int64_t context_id = 0;
  bool retain_graph = false;
  archive(context_id);
  archive(retain_graph);
  Agent& agent = *request.delivery->agent;
  const RRefSlot slot = RRefContext::of(agent)->find(rref);
  if (!slot)
    throw DistError("the value of this remote reference is not kept here (any more)", Code::closed);
  slot->then([responder = request.responder, weak = agent.weak_from_this(), context_id,
              retain_graph](const RRefSlot& slot) {
    auto answered = answer_to(responder);
    if (const auto error = slot->error()) return answered(error);
    try {
      const auto strong = weak.lock();
      if (strong) backward_here(*strong, slot->value(), context_id, retain_graph, answered);
    } catch (...) {
      answered(std::current_exception());
    }
  });
}

void detail::backward(const RRefHandle& held, std::int64_t context_id, bool retain_graph) {
  const auto agent = held.context().agent();
  if (held.is_owner()) {
    const KeptValue& kept = kept_value(held, "backward");
    const Promise<void> promise{std::weak_ptr<Agent>(agent)};
    backward_here(*agent, kept, context_id, retain_graph, [promise](std::exception_ptr error) {
      if (error) return promise.set_exception(error);
      promise.set_value();
    });
    return promise.future().wait();
  }
  held.context().check(held);
  Agent::OutgoingCall call;
  call.to = held.owner();
  call.kind = kRRefBackward;
  call.name = "backward";
  call.options.timeout = Duration::zero();
  call.observed = false;
  call.fill = [&](Value& value, ValueDelivery& delivery) {
    ValueOutput archive(value, delivery);
    encode_rref(archive, held.reference().rref);
    archive(context_id);
    archive(retain_graph);
  };
  const Answer answer = agent->call_sync(std::move(call));
  if (answer.error) std::rethrow_exception(answer.error);
}

namespace dist_autograd {

context::context() {
  const auto agent = current_agent("dist_autograd::context");
  if (thread_context != kNone)
    throw DistError("dist_autograd::context: this thread is in context " +
                    std::to_string(thread_context) + " already");
  id_ = DistAutograd::of(*agent)->new_context();
  thread_context = id_;
}

context::~context() {
  thread_context = kNone;
  if (const auto agent = RpcScope::current()->agent()) DistAutograd::of(*agent)->release(id_);
}

void backward(std::int64_t context_id, const std::vector<at::Tensor>& roots, bool retain_graph,
              Mode mode) {
  const auto agent = current_agent("dist_autograd::backward");
  const Promise<void> promise{std::weak_ptr<Agent>(agent)};
  DistAutograd::of(*agent)->backward(context_id, roots, retain_graph, mode,
                                     [promise](std::exception_ptr error) {
                                       if (error) return promise.set_exception(error);
                                       promise.set_value();
                                     });
  promise.future().wait();
}

Gradients get_gradients(std::int64_t context_id) {
  const auto agent = current_agent("dist_autograd::get_gradients");
  const auto context = DistAutograd::of(*agent)->find(context_id);
  const std::lock_guard lock(context->mutex);
  return context->gradients;
}

std::int64_t current_context() { return thread_context; }

}  // namespace dist_autograd
}  // namespace muster::rpc
