#include "rpc/agent/listener.h"

#include "core/tunables/tunables.h"

#include "core/base/threads/thread_start.h"

namespace muster::rpc {

Status Listener::start(const Agent* agent, const BindThread& bind) {
  auto started = start_thread("the thread that listens for calls", [this, agent, bind] {
    const AgentThread thread(agent, bind);
    listen();
  });
  if (!started.ok()) return started.status();
  thread_ = std::move(*started);
  return {};
}

void Listener::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_.store(true);
  }
  wanted_.notify_all();
  fabric_.wake();
  if (thread_.joinable()) thread_.join();
}

void Listener::listen() {
  while (!stopped_.load()) {
    if (drivers_.load() > 0) {
      stand_by();
      continue;
    }
    CoreOffer offer(idle_polls_);
    fabric_.wait(
        [&] {
          offer.polled(progress_());
          return stopped_.load() || drivers_.load(std::memory_order_relaxed) > 0;
        },
        TimePoint::max());
  }
}

/// While a caller drives the fabric. It may return in a microsecond or wait for an hour.
void Listener::stand_by() {
  const auto over = [this] { return stopped_.load(); };
  auto entries = entries_.load();
  std::unique_lock lock(mutex_);
  for (;;) {
    // Callers that make one call after another need the core and the messages for themselves.
    wanted_.wait_for(lock, tunables().rpc_stand_by, over);
    if (over()) return;
    const auto now = entries_.load();
    const bool waits = drivers_.load() > 0;
    if (now == entries && !waits) return;  // no caller has entered since the last check
    if (now == entries) {
      // The caller waits for long and will notify this thread when it leaves.
      dozing_.store(true);
      wanted_.wait(lock, [&] { return over() || drivers_.load() == 0; });
      dozing_.store(false);
      return;
    }
    entries = now;
  }
}

/// Unread messages are now the listener's, unless another caller waits.
void Listener::on_driver_left() {
  if (drivers_.fetch_sub(1) != 1 || !dozing_.load()) return;
  { const std::lock_guard lock(mutex_); }
  wanted_.notify_one();
}

}  // namespace muster::rpc
