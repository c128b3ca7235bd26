#include "rpc/agent/worker_pool.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/wait/callbacks.h"
#include "muster/rpc_future.h"
#include "rpc/agent/agent.h"
#include "rpc/wire/remote_exception.h"

namespace muster::rpc {
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
