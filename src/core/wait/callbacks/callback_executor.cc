#include "core/wait/callbacks/callback_executor.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/tunables/tunables.h"

namespace muster {
namespace {

constexpr auto kSpareLife = std::chrono::seconds(10);

thread_local constinit bool is_spared = false;

}  // namespace

void CallbackExecutor::spare_this_thread() { is_spared = true; }
bool CallbackExecutor::spares_this_thread() { return is_spared; }

Duration CallbackExecutor::WatchedQueue::period() const { return tunables().callback_look; }

void run_callback(const std::function<void()>& callback) {
  const ProgramSignals programs;
  try {
    callback();
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being ended
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("a callback threw: ") + error.what());
  } catch (...) {
    log(LogLevel::error, "a callback threw something that is no std::exception");
  }
}

CallbackExecutor& CallbackExecutor::of_process() {
  static constinit std::atomic<CallbackExecutor*> current{nullptr};
  CallbackExecutor* one = current.load(std::memory_order_acquire);
  while (one == nullptr || one->process_.forked()) {
    auto* fresh = new CallbackExecutor;
    fresh->parents_ = one;
    if (current.compare_exchange_strong(one, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *one;
}

/// Under the lock. The new thread counts as idle from here on.
bool CallbackExecutor::add_thread() {
  auto thread = start_thread("a thread for callbacks", [this] { work(); });
  if (!thread.ok()) return false;
  thread->detach();
  ++idle_;
  return true;
}

Status CallbackExecutor::prepare() {
  const std::lock_guard guard(lock_);
  if (idle_ > 0 || add_thread()) return {};
  return {
      Code::exhausted,
      "no thread can be started to run callbacks on; see `ulimit -u` and the memory that is left"};
}

void CallbackExecutor::run(Job job) {
  bool has_thread = true;
  {
    const std::lock_guard guard(lock_);
    if (!may_begin()) {
      new Job(std::move(job));  // what it holds may need an interpreter that is gone
      return;
    }
    jobs_.push_back(std::move(job));
    has_thread = idle_ > 0 || add_thread();
  }
  changed_.notify_one();
  if (!has_thread)
    log(LogLevel::error,
        "no thread can be started to run a callback on; it waits until another callback has "
        "returned");
}

void CallbackExecutor::watch(const std::shared_ptr<WatchedQueue>& what) {
  {
    const std::lock_guard guard(lock_);
    watched_.push_back(what);
    period_ = std::min(period_, what->period());
    if (idle_ == 0) add_thread();
  }
  changed_.notify_one();
}

void CallbackExecutor::look_after(std::unique_lock<std::mutex>& guard) {
  auto looked_at = std::exchange(watched_, {});
  Duration period = period_ = Duration::max();
  guard.unlock();
  std::erase_if(looked_at, [&period, now = steady_clock().now()](const auto& each) {
    const auto watched = each.lock();
    if (watched == nullptr || !watched->look(now)) return true;
    period = std::min(period, watched->period());
    return false;
  });
  guard.lock();
  period_ = std::min(period_, period);
  watched_.insert(watched_.end(), looked_at.begin(), looked_at.end());
}

/// Until there is a job. False: this thread is one too many.
bool CallbackExecutor::rest(std::unique_lock<std::mutex>& guard) {
  const auto called = [this] { return !jobs_.empty() || !watched_.empty(); };
  while (jobs_.empty()) {
    if (!watched_.empty()) {
      const Duration period = period_;
      changed_.wait_for(guard, period, [&] { return !jobs_.empty() || period_ < period; });
      if (jobs_.empty()) look_after(guard);
    } else if (idle_ == 1) {
      changed_.wait(guard, called);
    } else if (!changed_.wait_for(guard, kSpareLife, called) && idle_ > 1) {
      return false;
    }
  }
  return true;
}

void CallbackExecutor::work() {
  std::unique_lock guard(lock_);
  while (rest(guard)) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    if (!may_begin()) {
      new Job(std::move(job));
      continue;
    }
    --idle_;
    running_.push_back(pthread_self());
    if (idle_ == 0) add_thread();
    guard.unlock();
    run_callback(job);
    job = nullptr;
    guard.lock();
    std::erase(running_, pthread_self());
    ++idle_;
    if (running_.empty() && jobs_.empty()) over_.notify_all();
  }
  --idle_;
}

std::vector<pthread_t> CallbackExecutor::running_threads() {
  const std::lock_guard guard(lock_);
  return running_;
}

bool CallbackExecutor::begins_jobs() {
  const std::lock_guard guard(lock_);
  return may_begin();
}

bool CallbackExecutor::finish(Duration limit, std::function<bool()> usable) {
  std::unique_lock guard(lock_);
  const bool over =
      over_.wait_for(guard, limit, [this] { return running_.empty() && jobs_.empty(); });
  usable_ = std::move(usable);
  return over;
}

}  // namespace muster
