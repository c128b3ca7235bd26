// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/agent_threads.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/tunables/tunables.h"
#include "core/wait/callbacks.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent.h"
#include "rpc/wire/remote_exception.h"

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

namespace {

// How often `join`, while it waits for callbacks, checks whether the process is exiting: callbacks
// that have not begun then never run.
constexpr auto kLookForTheEnd = std::chrono::milliseconds(100);  // limit: patience at the end

}  // namespace

bool WorkerPool::run(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    const bool all_taken = static_cast<int>(tasks_.size()) >= idle_threads_;
    if (all_taken && static_cast<int>(threads_.size()) < most_ && !add_thread()) return false;
    tasks_.push_back(std::move(task));
    busy_.fetch_add(1);
  }
  changed_.notify_one();
  return true;
}

/// Under the lock. False if there is no thread to run tasks.
bool WorkerPool::add_thread() {
  auto thread = start_thread("a worker thread of RPC", [this] { work(); });
  if (thread.ok()) {
    threads_.push_back(std::move(*thread));
  } else if (threads_.empty()) {
    log(LogLevel::error, "worker '" + agent_->self().name() + "': " + thread.status().message());
  }
  return !threads_.empty();
}

void WorkerPool::run_callback(std::shared_ptr<const void> owner, Task callback) {
  busy_.fetch_add(1);
  CallbackExecutor::of_process().run(
      [this, owner = std::move(owner), callback = std::move(callback)]() mutable {
        {
          const AgentThread thread(agent_, bind_);
          muster::run_callback(callback);
          callback = nullptr;  // destroy what it captures before the agent may end
        }
        const std::lock_guard lock(mutex_);
        busy_.fetch_sub(1);
        if (stopped_) changed_.notify_all();
      });
}

void WorkerPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

void WorkerPool::join() {
  for (auto& thread : threads_) thread.join();
  std::unique_lock lock(mutex_);
  const auto done = [this] { return busy_.load() == 0; };
  while (!changed_.wait_for(lock, kLookForTheEnd, done) &&
         CallbackExecutor::of_process().begins_jobs()) {
  }
}

void WorkerPool::work() {
  const AgentThread thread(agent_, bind_);
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_threads_;
    changed_.wait(lock, [this] { return !tasks_.empty() || stopped_; });
    --idle_threads_;
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      const ProgramSignals programs;
      task();
    } catch (...) {
      log(LogLevel::error, "worker '" + agent_->self().name() + "': a callback threw: " +
                               describe_exception(std::current_exception()).text);
    }
    task = nullptr;
    busy_.fetch_sub(1);
    lock.lock();
  }
}

}  // namespace muster::rpc
