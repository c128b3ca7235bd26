// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/rref/rref_context.h"

#include <exception>
#include <utility>
#include <vector>

#include "core/group/errors.h"
#include "muster/rpc_function.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/functions.h"

namespace muster::rpc {
namespace {

std::exception_ptr exception_of(const Status& status) {
  try {
    group::raise(status);
  } catch (...) {
    return std::current_exception();
  }
}

// Polls during shutdown are several milliseconds apart. A confirmation arrives within this many
// polls, unless a reference is lost.
constexpr int kLooksBeforeWithdrawal = 200;  // limit: patience at the end

// A create has no reason text, so all of them have the same length.
std::size_t create_bytes() {
  static const std::size_t bytes = encode(RRefMessage{}).size();
  return bytes;
}

}  // namespace

// Takes the result of the function that makes a value, and tells the caller that it has run.
class RRefContext::Keeping final : public Responder {
 public:
  Keeping(std::shared_ptr<RRefContext> context, RRefHold held, std::string name,
          ResponderRef caller)
      : context_(std::move(context)),
        held_(std::move(held)),
        name_(std::move(name)),
        caller_(std::move(caller)) {}
  ~Keeping() override {
    if (held_->slot()->done()) return;
    held_->slot()->fail(std::make_exception_ptr(
        DistBackendError("'" + name_ + "' ended without a result", Code::aborted)));
  }

  bool keeps() const override { return true; }
  void keep(KeptValue value) override {
    held_->slot()->set(std::move(value));
    answer();
  }
  // torch's operators return an untyped result. A tensor is kept as one; any other result can only
  // be fetched.
  void reply(const std::function<void(Value&, ValueDelivery&)>& fill) override {
    auto packed = std::make_shared<Value>();
    ValueDelivery delivery;
    delivery.peer = context_->self();
    fill(*packed, delivery);
    std::optional<at::Tensor> tensor;
    try {
      tensor = detail::get_result<at::Tensor>(name_, *packed, delivery);
    } catch (const ValueError&) {
      // The result is not a tensor.
    }
    if (tensor) {
      keep(kept_of<at::Tensor>(std::move(*tensor)));
      return;
    }
    KeptValue value;
    value.type = &typeid(Value);
    value.object = packed;
    value.pack = [packed](Value& to, ValueDelivery&) { to = *packed; };
    keep(std::move(value));
  }
  void fail(std::exception_ptr error) override {
    held_->slot()->fail(std::move(error));
    answer();
  }
  bool cancelled() const override { return false; }  // other workers may already refer to the value

 private:
  // The caller only needs to know that the call has arrived. An error belongs to the reference.
  void answer() {
    if (auto caller = std::exchange(caller_, nullptr)) caller->reply([](Value&, ValueDelivery&) {});
  }
  std::shared_ptr<RRefContext> context_;
  RRefHold held_;
  std::string name_;
  ResponderRef caller_;
};

RRefHandle::~RRefHandle() {
  // The owner does not count a reference that was unusable when it was received.
  if (failure_.ok() || reference_.fork) context_->drop(reference_);
}

// Values may hold references to their own worker, a cycle. They are destroyed before the agent, not
// with the last reference.
struct RRefContext::End {
  explicit End(std::weak_ptr<RRefContext> c) : context(std::move(c)) {}
  ~End() {
    const auto strong = context.lock();
    if (!strong) return;
    std::unique_lock lock(strong->mutex_);
    const auto slots = std::exchange(strong->slots_, {});
    lock.unlock();
    // A thread that waits for a value not yet created gets an error.
    for (const auto& [rref, slot] : slots) {
      if (!slot->done())
        slot->fail(exception_of(Status(Code::closed, "RPC has been shut down on this worker")));
    }
  }
  End(const End&) = delete;
  std::weak_ptr<RRefContext> context;
};

RRefContext::RRefContext(const std::shared_ptr<Agent>& agent)
    : self_(agent->self().id()),
      workers_(static_cast<int>(agent->workers().size())),
      agent_(agent),
      ledger_(agent->self().id()) {}

std::shared_ptr<RRefContext> RRefContext::of(Agent& agent) {
  return agent.companion<RRefContext>(
      [&] { return std::make_shared<RRefContext>(agent.shared_from_this()); });
}

void RRefContext::install(const std::shared_ptr<Agent>& agent) {
  const auto context = of(*agent);
  const std::weak_ptr<RRefContext> weak = context;
  const auto with = [weak](void (RRefContext::*handle)(const Request&)) {
    return [weak, handle](const Request& request) {
      if (const auto self = weak.lock()) (self.get()->*handle)(request);
    };
  };
  agent->on(kRRefCreate, {.run =
                              [weak](Request request) {
                                if (const auto self = weak.lock())
                                  self->on_create(std::move(request));
                              },
                          .is_short = {}});
  agent->on(kRRefProtocol, {.run = with(&RRefContext::on_message),
                            .is_short = [](const Request&) { return true; }});
  agent->on(kRRefFetch, {.run = with(&RRefContext::on_fetch), .is_short = {}});
  agent->on(kRRefBackward, {.run = serve_rref_backward, .is_short = {}});
  agent->on_loss([weak](int worker, const Status& why) {
    if (const auto self = weak.lock()) self->on_loss(worker, why);
  });
  agent->add_drain(context);
  agent->companion<End>([&] { return std::make_shared<End>(context); });
}

std::shared_ptr<Agent> RRefContext::agent() const {
  if (auto agent = agent_.lock()) return agent;
  throw DistError(
      "this remote reference is of no use any more: RPC has been shut down on this worker",
      Code::closed);
}

RRefSlot RRefContext::slot_of_locked(const RRefId& rref) {
  RRefSlot& slot = slots_[rref];
  if (!slot) slot = std::make_shared<FutureState<KeptValue>>(agent_);
  return slot;
}

RRefHold RRefContext::hold_locked(const RRefReference& reference, Status failure) {
  RRefSlot slot;
  if (!reference.fork && failure.ok()) slot = slot_of_locked(reference.rref);
  return std::make_shared<RRefHandle>(shared_from_this(), reference, std::move(slot),
                                      std::move(failure));
}

void RRefContext::follow(std::unique_lock<std::mutex> lock, bool lost_some) {
  std::vector<RRefSlot> gone;
  std::vector<std::pair<RRefSlot, Status>> failed;
  std::vector<RRefMessage> to_send;
  // Messages to this worker itself are processed here; they may have further effects.
  for (;;) {
    RRefEffects effects = ledger_.take_effects();
    for (const RRefId& rref : effects.drop) {
      if (auto slot = slots_.extract(rref); !slot.empty()) gone.push_back(std::move(slot.mapped()));
    }
    for (auto& [reference, status] : effects.failed) {
      failed_.emplace(reference, status);
      if (reference.fork) continue;
      if (auto slot = slots_.extract(reference.rref); !slot.empty())
        failed.emplace_back(std::move(slot.mapped()), status);
    }
    bool again = false;
    for (RRefMessage& message : effects.send) {
      ledger_.acknowledged(
          message.to, message.number);  // links are reliable; if one breaks, the worker is lost
      if (message.to == self_) {
        again = true;
        (void)ledger_.receive(message).ok();
      } else {
        to_send.push_back(std::move(message));
      }
    }
    if (!again) break;
  }
  // Fail the slots whose value will never be created.
  if (lost_some) {
    for (auto entry = slots_.begin(); entry != slots_.end();) {
      const auto slot = entry++;
      if (ledger_.expects(slot->first)) continue;
      failed.emplace_back(slot->second, Status(Code::peer_failed,
                                               "this value was never made: the call that was to "
                                               "make it has not come, or its worker has died"));
      slots_.erase(slot);
    }
  }
  lock.unlock();
  for (auto& [slot, status] : failed) slot->fail(exception_of(status));
  const auto agent = agent_.lock();
  if (!agent || !agent->running()) return;
  for (const RRefMessage& message : to_send) {
    Agent::OutgoingCall call;
    call.to = message.to;
    call.kind = kRRefProtocol;
    call.fill = [&](Value& value, ValueDelivery&) { value.bytes = encode(message); };
    call.observed = false;
    try {
      agent->post(std::move(call));
    } catch (const std::exception&) {
      // The agent has ended in between, and with it the reference counting.
    }
  }
  // A value's destructor may be slow, so it runs on a worker thread.
  if (!gone.empty()) agent->run_later([gone = std::move(gone)] {});
}

RRefHold RRefContext::keep_here(KeptValue value) {
  std::unique_lock lock(mutex_);
  auto held = hold_locked(ledger_.create_here());
  lock.unlock();
  held->slot()->set(std::move(value));
  return held;
}

RRefHold RRefContext::create_at(int to, std::string name,
                                const std::function<void(Value&, ValueDelivery&)>& fill,
                                const CallOptions& options) {
  const auto agent = this->agent();
  if (to == self_) {
    std::unique_lock lock(mutex_);
    auto held = hold_locked(ledger_.create_here());
    lock.unlock();
    make_here(std::move(name), fill, held);
    return held;
  }
  std::unique_lock lock(mutex_);
  auto created = ledger_.create_at(to);
  if (!created.ok()) group::raise(created.status());
  auto held = hold_locked(created->reference);
  lock.unlock();
  const RRefMessage message = created->message;
  Agent::OutgoingCall call;
  call.to = to;
  call.kind = kRRefCreate;
  call.name = std::move(name);
  call.options = options;
  call.fill = [&](Value& value, ValueDelivery& delivery) {
    fill(value, delivery);
    value.bytes += encode(message);
  };
  try {
    agent->call(std::move(call), [self = shared_from_this(), message](const Answer& answer) {
      if (answer.error) self->lost(message);
    });
  } catch (...) {
    lost(message);
    throw;
  }
  return held;
}

void RRefContext::make_here(std::string name,
                            const std::function<void(Value&, ValueDelivery&)>& fill,
                            const RRefHold& held) {
  const auto agent = this->agent();
  Request request;
  request.from = self_;
  request.delivery = std::make_shared<ValueDelivery>();
  request.delivery->agent = agent.get();
  request.delivery->peer = self_;
  request.message.name = name;
  fill(request.message.value, *request.delivery);
  request.responder = std::make_shared<Keeping>(shared_from_this(), held, std::move(name), nullptr);
  const bool runs = agent->run_later(keep_autograd_context([request]() mutable {
    try {
      serve_function(request);
    } catch (...) {
      request.responder->fail(std::current_exception());
    }
  }));
  if (!runs)
    request.responder->fail(
        exception_of(Status(Code::closed, "RPC has been shut down on this worker")));
}

// Whether the message can be from worker `from` and names existing workers only.
Result<RRefMessage> RRefContext::read_message(std::string_view bytes, int from) const {
  auto message = decode_rref_message(bytes);
  if (!message.ok()) return message;
  if (message->from != from)
    return Status(Code::refused, "a message about a remote reference is in another's name", {from});
  for (const std::int32_t id :
       {message->rref.creator, message->rref.owner, message->fork.maker, message->fork.holder}) {
    if (!is_worker(id))
      return Status(Code::refused,
                    "a message about a remote reference names worker " + std::to_string(id) +
                        " of " + std::to_string(workers_),
                    {from});
  }
  return message;
}

void RRefContext::on_create(Request request) {
  std::string& bytes = request.message.value.bytes;
  if (bytes.size() < create_bytes())
    group::raise(
        Status(Code::refused, "a call that makes a remote value is malformed", {request.from}));
  auto message =
      read_message(std::string_view(bytes).substr(bytes.size() - create_bytes()), request.from);
  if (message.ok() && message->kind != RRefMessageKind::create)
    message =
        Status(Code::refused, "a call that makes a remote value does not say so", {request.from});
  if (!message.ok()) group::raise(message.status());
  bytes.resize(bytes.size() - create_bytes());

  std::unique_lock lock(mutex_);
  auto received = ledger_.receive(*message);
  RRefHold held;
  if (received.ok() && *received) held = hold_locked((*received)->reference);
  follow(std::move(lock));
  if (!received.ok()) group::raise(received.status());
  if (!held) group::raise(Status(Code::aborted, "the caller has given this call up"));
  request.responder = std::make_shared<Keeping>(shared_from_this(), std::move(held),
                                                request.message.name, std::move(request.responder));
  try {
    serve_function(request);
  } catch (...) {
    request.responder->fail(std::current_exception());
  }
}

void RRefContext::on_message(const Request& request) {
  auto message = read_message(request.message.value.bytes, request.from);
  if (message.ok() &&
      (message->kind == RRefMessageKind::create || message->kind == RRefMessageKind::fork))
    message = Status(Code::refused, "a remote reference came without the call that it belongs to",
                     {request.from});
  if (!message.ok()) group::raise(message.status());
  std::unique_lock lock(mutex_);
  const auto received = ledger_.receive(*message);
  follow(std::move(lock), message->kind == RRefMessageKind::withdraw);
  if (!received.ok()) group::raise(received.status());
}

void RRefContext::on_fetch(const Request& request) {
  ValueInput archive(request.message.value, *request.delivery);
  const RRefId rref = decode_rref(archive);
  const RRefSlot slot = find(rref);
  if (!slot)
    group::raise(
        Status(Code::closed, "the value of this remote reference is not kept here (any more)"));
  slot->then([responder = request.responder](const RRefSlot& slot) {
    if (!responder) return;
    if (const auto error = slot->error()) return responder->fail(error);
    const KeptValue& value = slot->value();
    try {
      if (!value.pack) detail::cannot_travel(*value.type);
      responder->reply(value.pack);
    } catch (...) {
      responder->fail(std::current_exception());
    }
  });
}

void RRefContext::on_loss(int worker, const Status& why) {
  const auto agent = agent_.lock();
  if (!agent) return;
  const Status named =
      why.with_context("worker '" + agent->workers()[static_cast<std::size_t>(worker)].name() +
                       "' (rank " + std::to_string(worker) + ") is lost");
  std::unique_lock lock(mutex_);
  ledger_.worker_died(worker, named);
  follow(std::move(lock), true);
}

void RRefContext::lost(const RRefMessage& message) {
  std::unique_lock lock(mutex_);
  ledger_.lost(message);
  follow(std::move(lock));
}

void RRefContext::save(ValueOutput& archive, const RRefHold& held) {
  if (archive.delivery().agent == nullptr)
    throw ValueError("a remote reference can travel in calls and their answers only");
  check(*held);
  std::unique_lock lock(mutex_);
  auto message = ledger_.fork(held->reference(), archive.delivery().peer);
  lock.unlock();
  if (!message.ok()) group::raise(message.status());
  archive.delivery().on_outcome.emplace_back(
      [self = shared_from_this(), message = *message](bool arrived) {
        if (!arrived) self->lost(message);
      });
  const std::string bytes = encode(*message);
  archive.put(bytes.data(), bytes.size());
}

RRefHold RRefContext::load(ValueInput& archive) {
  std::string bytes(create_bytes(), '\0');
  archive.get(bytes.data(), bytes.size());
  auto message = read_message(bytes, archive.delivery().peer);
  if (message.ok() && message->kind != RRefMessageKind::fork)
    message = Status(Code::refused, "a remote reference in it is none");
  if (!message.ok()) throw ValueError(message.status().message());
  std::unique_lock lock(mutex_);
  auto received = ledger_.receive(*message);
  RRefHold held;
  if (received.ok() && *received) {
    held = hold_locked((*received)->reference, (*received)->status);
  } else if (received.ok()) {  // the call was withdrawn before it arrived
    held = hold_locked(
        {message->rref, message->rref.owner == self_ ? std::nullopt : std::optional(message->fork)},
        Status(Code::aborted, "the call that this reference came with was given up"));
  }
  follow(std::move(lock));
  if (!received.ok()) throw ValueError(received.status().message());
  return held;
}

bool RRefContext::confirmed(const RRefReference& reference) const {
  const std::lock_guard lock(mutex_);
  return ledger_.confirmed(reference);
}

void RRefContext::check(const RRefHandle& held) const {
  if (!held.failure().ok()) group::raise(held.failure());
  std::unique_lock lock(mutex_);
  if (const auto found = failed_.find(held.reference()); found != failed_.end()) {
    const Status status = found->second;
    lock.unlock();
    group::raise(status);
  }
  const Status status = ledger_.state(held.reference());
  lock.unlock();
  if (!status.ok()) group::raise(status);
}

void RRefContext::drop(const RRefReference& reference) {
  std::unique_lock lock(mutex_);
  failed_.erase(reference);
  ledger_.drop(reference);
  follow(std::move(lock));
}

RRefSlot RRefContext::find(const RRefId& rref) {
  const std::lock_guard lock(mutex_);
  if (rref.owner != self_ || !is_worker(rref.creator) || !ledger_.expects(rref)) return nullptr;
  return slot_of_locked(rref);
}

std::size_t RRefContext::owned() const {
  const std::lock_guard lock(mutex_);
  return ledger_.owned();
}

void RRefContext::begin() {
  std::unique_lock lock(mutex_);
  ledger_.drop_forks();
  follow(std::move(lock));
}

bool RRefContext::idle() {
  const auto agent = agent_.lock();
  const bool calls_are_over = agent && agent->counts().in_flight == 0;
  // Also drop forks that arrived with the last replies.
  std::unique_lock lock(mutex_);
  ledger_.drop_forks();
  const bool settled = ledger_.forks_settled();
  looks_without_end_ = settled || !calls_are_over ? 0 : looks_without_end_ + 1;
  if (looks_without_end_ == kLooksBeforeWithdrawal) ledger_.withdraw_passed_on();
  follow(std::move(lock));
  return settled;
}

std::string RRefContext::waits_for() const {
  const auto agent = agent_.lock();
  const std::lock_guard lock(mutex_);
  if (!agent || ledger_.forks_settled()) return {};
  std::string names;
  for (const int worker : ledger_.waiting_for())
    names += (names.empty() ? "'" : ", '") +
             agent->workers()[static_cast<std::size_t>(worker)].name() + "'";
  return "the confirmation or release of remote references by " + names;
}

void detail::cannot_travel(const std::type_info& type) {
  throw DistError(
      "a value of type " + type_name(type) +
      " cannot travel: keep it where it is made (remote), and call functions on it there");
}

void serve_function(Request& request) {
  const std::string& name = request.message.name;
  if (const auto function = find_function(name))
    return function->serve(request.message.value, *request.delivery, request.responder);
  if (is_operator(name)) return serve_operator(request);
  throw DistError("no function '" + name + "' is registered on this worker");
}

void encode_rref(ValueOutput& archive, const RRefId& rref) {
  archive(rref.creator);
  archive(rref.owner);
  archive(rref.number);
}

RRefId decode_rref(ValueInput& archive) {
  RRefId rref;
  archive(rref.creator);
  archive(rref.owner);
  archive(rref.number);
  return rref;
}

}  // namespace muster::rpc
