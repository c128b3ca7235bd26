// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/request_server.h"

#include <exception>
#include <string>

#include "core/base/log/log.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent.h"
#include "rpc/wire/remote_exception.h"

namespace muster::rpc {
namespace {

/// Whether the thread has a worker thread's settings: a handler must behave the same on the thread
/// of any caller.
bool thread_is_plain() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

}  // namespace

/// The answer to one request.
class RequestServer::Answering final : public Responder {
 public:
  Answering(RequestServer& server, int from, std::uint64_t call)
      : server_(server), agent_(server.agent_.shared_from_this()), from_(from), call_(call) {
    server_.unanswered_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Answering() override;

  void reply(const std::function<void(Value&, ValueDelivery&)>& fill) override;
  void fail(std::exception_ptr error) override;
  bool cancelled() const override { return cancelled_.load(std::memory_order_relaxed); }

  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  /// Drops the request without an answer.
  void forget() {
    if (!answered_.exchange(true)) finish();
  }
  void set_scope(std::shared_ptr<Observer::RequestScope> scope) { scope_ = std::move(scope); }
  void set_listed() { listed_ = true; }

 private:
  void finish();
  void send_error(const std::exception_ptr& error) noexcept;

  RequestServer& server_;
  const std::shared_ptr<Agent> agent_;  // and with it the server
  const int from_;
  const std::uint64_t call_;
  std::shared_ptr<Observer::RequestScope> scope_;
  bool listed_ = false;  // in the server's list of what is served
  // The thread that sets it answers the request; all others do nothing.
  std::atomic<bool> answered_{false};
  std::atomic<bool> cancelled_{false};
};

void RequestServer::on(MessageKind kind, Handler handler) {
  const std::lock_guard lock(mutex_);
  // Replaced handlers are kept: a request may still be running one.
  all_handlers_.push_back(std::make_unique<const Handler>(std::move(handler)));
  handlers_[static_cast<std::size_t>(kind)].store(all_handlers_.back().get(),
                                                  std::memory_order_release);
}

void RequestServer::cancel_all_of(int peer) {
  // The last owner of a request answers it, which takes the lock: none is dropped under it.
  std::vector<std::shared_ptr<Answering>> cancelled;
  const std::lock_guard lock(mutex_);
  for (auto& [key, weak] : serving_) {
    if (key.first != peer) continue;
    if (auto answering = weak.lock()) {
      answering->cancel();
      cancelled.push_back(std::move(answering));
    }
  }
}

void RequestServer::take(int from, RpcMessage message) {
  const MessageKind kind = message.kind;
  const std::uint64_t call = message.call;
  const std::int64_t time_left = message.time_left;
  Request request;
  request.from = from;
  if (time_left >= 0) request.deadline = deadline_after(agent_.clock(), Duration(time_left));
  request.delivery = std::make_shared<ValueDelivery>(&agent_, from);
  std::shared_ptr<Answering> answering;
  if (message.wants_answer) {
    answering = std::make_shared<Answering>(*this, from, call);
    request.responder = answering;
  }
  request.message = std::move(message);
  const Handler* handler =
      handlers_[static_cast<std::size_t>(kind)].load(std::memory_order_acquire);
  if (handler == nullptr) {
    if (answering)
      answering->fail(std::make_exception_ptr(DistError(
          "nobody there handles messages of kind " + std::to_string(static_cast<int>(kind)),
          Code::unsupported)));
    handled_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (handler->is_short && thread_is_plain() && handler->is_short(request)) {
    inline_runs_.fetch_add(1, std::memory_order_relaxed);
    return run(*handler, std::move(request), answering && time_left == 0);
  }
  if (answering) {
    answering->set_listed();
    const std::lock_guard lock(mutex_);
    serving_[{from, call}] = answering;
  }
  // Shared, since a task must be copyable.
  auto shared = std::make_shared<Request>(std::move(request));
  answering.reset();
  const bool runs = pool_.run([this, handler, shared] {
    const auto& responder = shared->responder;
    const bool unwanted =
        responder && (responder->cancelled() || agent_.clock().now() >= shared->deadline);
    run(*handler, std::move(*shared), unwanted);
  });
  if (runs) return;
  handled_.fetch_add(1, std::memory_order_relaxed);
  if (shared->responder)
    shared->responder->fail(std::make_exception_ptr(
        DistError("no thread can be started there to run it (ulimit -u)", Code::exhausted)));
}

/// `unwanted`: the caller no longer waits for the answer.
void RequestServer::run(const Handler& handler, Request request, bool unwanted) {
  const bool counts = request.message.kind != MessageKind::closing;
  const auto responder = std::static_pointer_cast<Answering>(request.responder);
  std::shared_ptr<Observer::RequestScope> scope;
  try {
    if (unwanted) {
      responder->forget();
    } else {
      if (request.message.observed && observer_) {
        scope = observer_->request_arrives(request.from, request.message);
        if (scope && responder) responder->set_scope(scope);
        if (scope) scope->enter();
      }
      handler.run(std::move(request));
    }
  } catch (...) {
    if (responder) {
      responder->fail(std::current_exception());
    } else {
      log(LogLevel::error, "worker '" + agent_.self().name() +
                               "': a message that wants no answer failed: " +
                               describe_exception(std::current_exception()).text);
    }
  }
  if (scope) scope->leave();
  if (counts) handled_.fetch_add(1, std::memory_order_relaxed);
}

void RequestServer::cancel(int from, std::uint64_t call) {
  std::shared_ptr<Answering> answering;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = serving_.find({from, call}); found != serving_.end())
      answering = found->second.lock();
  }
  if (answering) answering->cancel();
}

// ---- answers

RequestServer::Answering::~Answering() {
  if (answered_.load()) return;
  send_error(std::make_exception_ptr(
      DistError("the function there was given up without an answer", Code::aborted)));
}

void RequestServer::Answering::finish() {
  if (listed_) {
    const std::lock_guard lock(server_.mutex_);
    server_.serving_.erase({from_, call_});
  }
  server_.unanswered_.fetch_sub(1, std::memory_order_relaxed);
}

void RequestServer::Answering::reply(const std::function<void(Value&, ValueDelivery&)>& fill) {
  if (answered_.exchange(true)) throw DistError("a call was answered twice");
  const AgentLife::AgentUse use(server_.life_);
  if (!use) return finish();
  try {
    ValueDelivery delivery(agent_.get(), from_);
    RpcMessage message;
    message.kind = MessageKind::reply;
    message.call = call_;
    fill(message.value, delivery);
    if (scope_ && server_.observer_) {
      server_.observer_->reply_leaves(from_, message, scope_);
      message.observed = true;
    }
    auto outbound = server_.outbox_.prepare(from_, std::move(message), Copies::where_shared);
    const auto outcome = outbound.delivery = delivery.take();
    server_.outbox_.launch(std::move(outbound));
    if (outcome) outcome->arrived = true;
  } catch (...) {
    return send_error(std::current_exception());
  }
  finish();
}

void RequestServer::Answering::fail(std::exception_ptr error) {
  if (answered_.exchange(true)) return;
  send_error(error);
}

void RequestServer::Answering::send_error(const std::exception_ptr& error) noexcept {
  const AgentLife::AgentUse use(server_.life_);
  if (use) {
    try {
      RpcMessage message;
      message.kind = MessageKind::error;
      message.call = call_;
      message.value.bytes = encode_error(describe_exception(error));
      server_.outbox_.launch(
          server_.outbox_.prepare(from_, std::move(message), Copies::where_shared));
    } catch (...) {
      // Without memory for an error no answer can be sent.
    }
  }
  finish();
}

}  // namespace muster::rpc
