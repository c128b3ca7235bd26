#include "rpc/agent/request_server.h"

#include <algorithm>
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
class RequestServer::Answering final
    : public Responder,
      public std::enable_shared_from_this<RequestServer::Answering> {
 public:
  Answering(RequestServer& server, int from, std::uint64_t call, std::shared_ptr<Passage> arguments)
      : server_(server),
        agent_(server.agent_.shared_from_this()),
        from_(from),
        call_(call),
        arguments_(std::move(arguments)) {
    server_.unanswered_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Answering() override;

  void reply(const std::function<void(Value&, Passage&)>& fill) override;
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
  bool ready() const;

  RequestServer& server_;
  const std::shared_ptr<Agent> agent_;  // and with it the server
  const int from_;
  const std::uint64_t call_;
  std::shared_ptr<Passage> arguments_;
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

void RequestServer::clear() {
  const std::lock_guard lock(mutex_);
  held_back_.clear();
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

void RequestServer::send_held_back() {
  std::vector<std::function<bool()>> held;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    held.swap(held_back_);
    held_back_count_.store(0);
  }
  std::erase_if(held, [](const auto& sent) { return sent(); });
  if (held.empty()) return;
  const std::lock_guard lock(mutex_);
  for (auto& one : held) held_back_.push_back(std::move(one));
  held_back_count_.store(held_back_.size());
}

void RequestServer::take(int from, const Head& head, Parcel parcel) {
  Request request;
  request.from = from;
  request.kind = head.kind;
  request.parcel = std::move(parcel);
  if (head.time_left >= 0)
    request.deadline = deadline_after(agent_.clock(), Duration(head.time_left));
  request.passage = std::make_shared<Passage>(&agent_, from);
  std::shared_ptr<Answering> answering;
  if ((head.flags & Head::kWantsAnswer) != 0) {
    answering = std::make_shared<Answering>(*this, from, head.call, request.passage);
    request.responder = answering;
  }
  const Handler* handler =
      handlers_[static_cast<std::size_t>(head.kind)].load(std::memory_order_acquire);
  if (handler == nullptr) {
    if (answering)
      answering->fail(std::make_exception_ptr(DistError(
          "nobody there handles messages of kind " + std::to_string(static_cast<int>(head.kind)),
          Code::unsupported)));
    handled_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool observed = (head.flags & Head::kObserved) != 0;
  if (handler->is_short && thread_is_plain() && handler->is_short(request)) {
    inline_runs_.fetch_add(1, std::memory_order_relaxed);
    return run(*handler, std::move(request), observed, answering && head.time_left == 0);
  }
  if (answering) {
    answering->set_listed();
    const std::lock_guard lock(mutex_);
    serving_[{from, head.call}] = answering;
  }
  // Shared, since a task must be copyable.
  auto shared = std::make_shared<Request>(std::move(request));
  answering.reset();
  const bool runs = pool_.run([this, handler, shared, observed] {
    const auto& responder = shared->responder;
    const bool unwanted =
        responder && (responder->cancelled() || agent_.clock().now() >= shared->deadline);
    run(*handler, std::move(*shared), observed, unwanted);
  });
  if (runs) return;
  handled_.fetch_add(1, std::memory_order_relaxed);
  if (shared->responder)
    shared->responder->fail(std::make_exception_ptr(
        DistError("no thread can be started there to run it (ulimit -u)", Code::exhausted)));
}

/// `unwanted`: the caller no longer waits for the answer.
void RequestServer::run(const Handler& handler, Request request, bool observed, bool unwanted) {
  const bool counts = request.kind != MessageKind::closing;
  const auto responder = std::static_pointer_cast<Answering>(request.responder);
  std::shared_ptr<Observer::RequestScope> scope;
  try {
    if (unwanted) {
      responder->forget();
    } else {
      if (observed && observer_) {
        scope = observer_->request_arrives(request.from, request.parcel);
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

bool RequestServer::Answering::ready() const {
  return std::all_of(arguments_->before_answer.begin(), arguments_->before_answer.end(),
                     [](const auto& holds) { return holds(); });
}

void RequestServer::Answering::reply(const std::function<void(Value&, Passage&)>& fill) {
  if (answered_.exchange(true)) throw DistError("a call was answered twice");
  const AgentLife::AgentUse use(server_.life_);
  if (!use) return finish();
  OutboundMessage message;
  try {
    Passage passage(agent_.get(), from_);
    Parcel parcel;
    fill(parcel.value, passage);
    Head head;
    head.kind = MessageKind::reply;
    head.call = call_;
    if (scope_ && server_.observer_) {
      server_.observer_->reply_leaves(from_, parcel, scope_);
      head.flags |= Head::kObserved;
    }
    message =
        server_.outbox_.prepare(from_, std::move(head), std::move(parcel), Copies::where_shared);
    passage.arrived = true;
    message.passage = passage.take();
  } catch (...) {
    send_error(std::current_exception());
    return;
  }
  if (ready()) {
    server_.outbox_.launch(std::move(message));
    finish();
    return;
  }
  auto held = std::make_shared<OutboundMessage>(std::move(message));
  const std::lock_guard lock(server_.mutex_);
  server_.held_back_.push_back([self = shared_from_this(), held] {
    if (!self->ready()) return false;
    self->server_.outbox_.launch(std::move(*held));
    self->finish();
    return true;
  });
  server_.held_back_count_.store(server_.held_back_.size());
}

void RequestServer::Answering::fail(std::exception_ptr error) {
  if (answered_.exchange(true)) return;
  send_error(error);
}

void RequestServer::Answering::send_error(const std::exception_ptr& error) noexcept {
  const AgentLife::AgentUse use(server_.life_);
  if (use) {
    try {
      Head head;
      head.kind = MessageKind::error;
      head.call = call_;
      Parcel parcel;
      parcel.value.bytes = encode_error(describe_exception(error));
      server_.outbox_.launch(
          server_.outbox_.prepare(from_, std::move(head), std::move(parcel), Copies::where_shared));
    } catch (...) {
      // Without memory for an error no answer can be sent.
    }
  }
  finish();
}

}  // namespace muster::rpc
