#include "muster/rpc/worker_pool.h"

#include <exception>
#include <string>
#include <utility>

#include "muster/base/log.h"
#include "muster/rpc/agent.h"
#include "muster/rpc/errors.h"

namespace muster::rpc {

bool WorkerPool::run(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    busy_.fetch_add(1);
    tasks_.push_back(std::move(task));
    const bool all_taken = static_cast<int>(tasks_.size()) > idle_threads_;
    if (all_taken && static_cast<int>(threads_.size()) < most_)
      threads_.emplace_back([this] { work(); });
  }
  changed_.notify_one();
  return true;
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
  tasks_.clear();
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
