// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/agent.h"

#include <algorithm>
#include <thread>

#include "core/base/exception_status.h"
#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/tunables/tunables_fixed.h"
#include "core/wait/spin_wait.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent_closing.h"
#include "rpc/agent/inbox.h"
#include "rpc/wire/remote_exception.h"

namespace muster::rpc {
std::shared_ptr<Agent> Agent::create(std::shared_ptr<transport::Fabric> fabric,
                                     const std::vector<std::string>& names, AgentOptions options) {
  if (static_cast<int>(names.size()) != fabric->world_size())
    group::invalid("an agent needs one name for each of its " +
                   std::to_string(fabric->world_size()) + " workers");
  return std::shared_ptr<Agent>(new Agent(std::move(fabric), names, std::move(options)));
}

Agent::Agent(std::shared_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
             AgentOptions options)
    : fabric_(std::move(fabric)),
      workers_(names, fabric_->rank()),
      options_(std::move(options)),
      rpc_timeout_(options_.rpc_timeout.count()),
      calls_(workers_.size()),
      inbox_(fabric_->agreements(), workers_.self_id(), calls_, *this),
      outbox_(fabric_->agreements(), workers_,
              {.ours = options_.device_maps, .callers = options_.maps_of_callers}, inbox_),
      pool_(this, options_.num_worker_threads, options_.bind_thread),
      server_(*this, life_, outbox_, pool_),
      listener_(*fabric_, [this] { return guarded_progress(); }),
      closing_(std::make_unique<AgentClosing>(*this)) {
  on(MessageKind::closing, {[this](Request request) { closing_->take(std::move(request)); },
                            [](const Request&) { return true; }});
}

Agent::~Agent() { stop(); }

DeviceMap Agent::device_map(const WorkerInfo& worker) const {
  const auto map = options_.device_maps.find(worker.name());
  return map == options_.device_maps.end() ? DeviceMap() : map->second;
}

void Agent::start() {
  if (!life_.start() || !fabric_->threads()) return;
  if (const Status started = listener_.start(this, options_.bind_thread); !started)
    group::raise(started);
}

// ---- calling

Agent::Limit Agent::limit_of(const CallOptions& options) const {
  Limit limit;
  limit.timeout = options.timeout.value_or(rpc_timeout());
  if (limit.timeout < Duration::zero())
    group::invalid("a timeout of a call must not be negative; zero is none");
  if (limit.timeout > Duration::zero()) limit.deadline = deadline_after(clock(), limit.timeout);
  return limit;
}

std::uint64_t Agent::begin_call(OutgoingCall& call, const Limit& limit, bool expires, Copies copies,
                                Completion completion) {
  if (!workers_.contains(call.to)) worker(To(call.to));  // throws
  const auto deadline = limit.deadline;
  ValueDelivery delivery(this, call.to);
  RpcMessage message;
  message.kind = call.kind;
  message.wants_answer = true;
  message.name = call.name;
  if (call.fill) call.fill(message.value, delivery);
  Observer* const observer = call.observed ? server_.observer() : nullptr;
  message.observed = observer != nullptr && observer->request_leaves(call.to, message);
  const auto number = message.call = calls_.next_number();
  if (deadline != TimePoint::max()) {
    // Packing this little takes less time than reading the clock.
    const bool little =
        message.value.tensors.empty() && message.value.bytes.size() <= fixed::kSmallMessage;
    message.time_left = little ? limit.timeout.count()
                               : std::max<std::int64_t>((deadline - clock().now()).count(), 0);
  }
  auto outbound = outbox_.prepare(call.to, std::move(message), copies);
  outbound.is_call = true;
  PendingCall pending{call.to, std::move(call.name), expires ? deadline : TimePoint::max(),
                      std::move(completion), delivery.take()};
  if (const Status gone = calls_.add(number, pending); !gone.ok()) {
    pending.fail(workers_.loss_error(pending.to, pending.name, gone));
    return number;
  }
  try {
    outbox_.launch_counted(std::move(outbound));
  } catch (...) {
    if (calls_.take(number, call.to)) throw;
    // The worker was lost in between, and the completion has received that error.
  }
  return number;
}

std::uint64_t Agent::call(OutgoingCall call, Completion completion) {
  const AgentLife::AgentUse use(life_);
  if (!use)
    throw DistBackendError("RPC of worker '" + self().name() + "' has ended", Code::aborted);
  const auto limit = limit_of(call.options);
  const bool expires = limit.deadline != TimePoint::max();
  if (expires) {
    completion = [inner = std::move(completion), this, to = call.to, name = call.name,
                  timeout = limit.timeout](Answer answer) {
      if (!answer.error && !answer.delivery)
        answer.error = workers_.timeout_error(to, name, timeout);  // expired
      inner(std::move(answer));
    };
  }
  return begin_call(call, limit, expires, Copies::all, std::move(completion));
}

Answer Agent::call_sync(OutgoingCall call, const std::function<bool()>& unwanted) {
  const AgentLife::AgentUse use(life_);
  if (!use)
    throw DistBackendError("RPC of worker '" + self().name() + "' has ended", Code::aborted);
  struct PendingFuture {
    Answer answer;
    std::atomic<bool> done{false};
  } waiting;
  const auto limit = limit_of(call.options);
  const int to = call.to;
  const auto number = begin_call(call, limit, false, Copies::none, [&waiting](Answer answer) {
    waiting.answer = std::move(answer);
    waiting.done.store(true, std::memory_order_release);
  });
  const auto answered = [&waiting] { return waiting.done.load(std::memory_order_acquire); };
  bool in_time = false;
  try {
    in_time = wait([&] { return answered() || (unwanted && unwanted()); }, limit.deadline);
  } catch (...) {
    // No thread may write the answer or read the arguments after this frame has been unwound.
    if (!answered() && !calls_.take(number, to)) yield_until(answered);
    outbox_.withdraw(number);
    throw;
  }
  if (!answered()) {
    if (auto pending = calls_.take(number, to)) {
      give_up(to, number);
      waiting.answer.error =
          in_time
              ? workers_.loss_error(to, pending->name,
                                    Status(Code::aborted, "it was given up here", {self().id()}))
              : workers_.timeout_error(to, pending->name, limit.timeout);
    } else {
      // Another thread is writing the answer now.
      yield_until(answered);
    }
  }
  if (!outbox_.empty()) outbox_.withdraw(number);
  return std::move(waiting.answer);
}

/// Tells the callee that the caller no longer waits for the reply.
void Agent::give_up(int peer, std::uint64_t call) {
  outbox_.withdraw(call);
  if (calls_.is_lost(peer)) return;
  RpcMessage message;
  message.kind = MessageKind::cancel;
  message.call = call;
  outbox_.launch(outbox_.prepare(peer, std::move(message), Copies::none));
}

void Agent::cancel(std::uint64_t call, std::exception_ptr error) {
  const AgentLife::AgentUse use(life_);
  auto pending = calls_.take(call, -1);
  if (!pending) return;
  if (use) give_up(pending->to, call);
  pending->fail(std::move(error));
  if (use) fabric_->wake();
}

void Agent::post(OutgoingCall call) {
  const AgentLife::AgentUse use(life_);
  if (!use) return;
  ValueDelivery delivery(this, call.to);
  RpcMessage message;
  message.kind = call.kind;
  message.name = std::move(call.name);
  if (call.fill) call.fill(message.value, delivery);
  const bool counted = call.kind != MessageKind::closing && call.kind != MessageKind::cancel;
  auto outbound = outbox_.prepare(call.to, std::move(message), Copies::all);
  outbound.delivery = delivery.take();
  if (calls_.is_lost(call.to)) return;
  counted ? outbox_.launch_counted(std::move(outbound)) : outbox_.launch(std::move(outbound));
}

// ---- what comes

void Agent::on_message(int from, RpcMessage message) {
  switch (message.kind) {
    case MessageKind::reply:
    case MessageKind::error: return on_answer(from, std::move(message));
    case MessageKind::cancel: return server_.cancel(from, message.call);
    default: return server_.take(from, std::move(message));
  }
}

void Agent::on_answer(int from, RpcMessage message) {
  auto pending = calls_.take(message.call, from);
  if (!pending) return;  // the call timed out or was abandoned
  Answer answer;
  answer.delivery = std::make_shared<ValueDelivery>(this, from);
  if (message.kind == MessageKind::error) {
    auto error = decode_error(message.value.bytes);
    if (!error) {
      answer.error = workers_.loss_error(from, pending->name, error.status());
    } else {
      answer.error =
          remote_exception(workers_.at(from).name(), from, pending->name, std::move(*error));
    }
  } else {
    try {
      if (message.observed && server_.observer() != nullptr)
        server_.observer()->reply_arrives(from, message);
    } catch (...) {
      answer.error = std::current_exception();
    }
    answer.value = std::move(message.value);
    if (pending->delivery) pending->delivery->arrived = true;
  }
  pending->completion(std::move(answer));
  fabric_->wake();
}

void Agent::on_loss(int peer, const Status& why) {
  auto calls = calls_.lose(
      peer, why.ok() ? Status(Code::closed, workers_.describe(peer) + " has left", {peer}) : why);
  if (!calls) return;
  const Status cause = lost(peer);
  if (logs(LogLevel::info))
    log(LogLevel::info, "worker '" + self().name() + "' has lost " + workers_.describe(peer) +
                            ": " + why.message());
  for (auto& call : *calls) call.fail(workers_.loss_error(peer, call.name, cause));
  server_.cancel_all_of(peer);
  for (const auto& callback : loss_callbacks_) {
    // Without a thread for it, it runs here: what waits for the lost worker must learn of it.
    if (!run_later([callback, peer, cause] { callback(peer, cause); }) && running())
      callback(peer, cause);
  }
  fabric_->wake();
}

/// For threads without a caller to report to. An unreadable message may have come from any worker,
/// so all of them are lost.
bool Agent::guarded_progress() {
  try {
    return progress();
  } catch (...) {
    const Status why = status_of_exception();
    log(LogLevel::error, workers_.describe(self().id()) + ": " + why.message());
    for (const WorkerInfo& worker : workers())
      if (worker.id() != self().id())
        on_loss(worker.id(), why.with_context(workers_.describe(self().id())));
    return true;
  }
}

void Agent::on_loss(std::function<void(int worker, const Status& why)> callback) {
  loss_callbacks_.push_back(std::move(callback));
}

// ---- getting on

bool Agent::progress() {
  const bool moved = inbox_.look();
  if (!outbox_.empty()) {
    for (const auto& refused : outbox_.sweep()) {
      if (auto pending = calls_.take(refused.call, refused.to))
        pending->fail(workers_.loss_error(refused.to, pending->name, refused.why));
    }
  }
  if (calls_.may_expire()) expire_calls();
  return moved;
}

void Agent::expire_calls() {
  auto expired = calls_.take_expired(clock().now());
  for (auto& [number, pending] : expired) {
    give_up(pending.to, number);
    pending.completion({});  // `call` turns an empty answer into the timeout error
  }
  if (!expired.empty()) fabric_->wake();
}

bool Agent::wait(const std::function<bool()>& done, TimePoint deadline) {
  if (done()) return true;
  const AgentLife::AgentUse use(life_);
  if (!use) return done();
  bool holds = false;
  {
    const Listener::ListenerDriver driver(listener_);
    CoreOffer offer(listener_.idle_polls());
    const auto over = [&] {
      holds = done();
      if (!holds) {
        const bool moved = progress();
        holds = done();
        offer.polled(moved || holds);
      }
      return holds || life_.stopped();
    };
    fabric_->wait(std::ref(over), deadline);
  }
  return holds || done();
}

void Agent::wake() {
  const AgentLife::AgentUse use(life_);
  if (use) fabric_->wake();
}

void Agent::add_drain(std::shared_ptr<Drain> drain) { closing_->add_drain(std::move(drain)); }

Agent::Counts Agent::counts() const {
  Counts counts;
  counts.calls = outbox_.sent();
  counts.requests = server_.handled();
  counts.inline_runs = server_.inline_runs();
  counts.in_flight = calls_.size();
  return counts;
}

// ---- the end

/// True if no task, request, message or call of this worker is in flight.
bool Agent::quiet() {
  return pool_.idle() && server_.idle() && outbox_.empty() && calls_.size() == 0 && inbox_.empty();
}

void Agent::shut_down(Duration timeout) {
  if (timeout < Duration::zero())
    group::invalid("shutdown: a timeout must not be negative; zero is none");
  if (AgentThread::runs_here(this))
    group::invalid(
        "shutdown was called by a function that runs on this worker; call it from the worker's own "
        "thread");
  if (!running()) return stop();
  const auto deadline =
      timeout == Duration::zero() ? TimePoint::max() : deadline_after(clock(), timeout);
  Status status;
  try {
    status = closing_->run(deadline);
  } catch (...) {
    stop();
    throw;
  }
  stop();
  if (!status.ok()) group::raise(status);
}

void Agent::fail_all() {
  const Status over(Code::aborted, "RPC of worker '" + self().name() + "' has ended",
                    {self().id()});
  for (auto& call : calls_.take_all()) call.fail(workers_.loss_error(call.to, call.name, over));
}

void Agent::stop() {
  if (AgentThread::runs_here(this)) {
    // The last handle was destroyed on one of the agent's own threads, which cannot join itself.
    std::terminate();
  }
  const std::lock_guard one_ends(ending_mutex_);
  if (!fabric_) return;
  life_.stop();
  pool_.stop();
  listener_.stop();
  fail_all();
  // Threads inside the agent notice the end and leave. Calls that they have started in the meantime
  // fail too.
  yield_until([this] {
    fabric_->wake();
    return !life_.in_use();
  });
  fail_all();
  pool_.join();
  outbox_.clear();
  fabric_.reset();
  {
    const std::lock_guard lock(companions_.mutex);
    companions_.by_type.clear();
  }
  options_.meeting_place.reset();
  drop_spare_memory();
}

}  // namespace muster::rpc
