// SPDX-License-Identifier: BSD-3-Clause
#include "core/wait/callbacks.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/descriptor.h"
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

/// A thread that takes jobs, one after another.
struct CallbackLane::Runner {
  std::atomic<int> busy{0};
  std::optional<ThreadRest> rest;          // once it has begun; under the lane's lock
  std::shared_ptr<CallbackLane> children;  // of the job that runs: its own thread's
  TimePoint began{};                       // the job that runs; under the lane's lock

  bool stands_still(TimePoint now) {
    return rest && busy.load() == 0 &&
           rest->stands_still(now, began, tunables().callback_standstill);
  }
};

thread_local constinit const std::shared_ptr<CallbackLane::Runner>* CallbackLane::of_thread =
    nullptr;

CallbackLane::Busy::Busy() : runner_(of_thread != nullptr ? *of_thread : nullptr) {
  if (runner_) runner_->busy.fetch_add(1);
}
CallbackLane::Busy::~Busy() {
  if (runner_) runner_->busy.fetch_sub(1);
}

std::shared_ptr<CallbackLane> CallbackLane::of_this_job() {
  if (of_thread == nullptr) return nullptr;
  auto& children = (*of_thread)->children;
  if (!children) children = std::make_shared<CallbackLane>();
  return children;
}

/// Under the lock.
void CallbackLane::begin() {
  runner_ = std::make_shared<Runner>();
  CallbackExecutor::of_process().run(
      [self = shared_from_this(), me = runner_] { self->serve(me); });
}

void CallbackLane::run(CallbackExecutor::Job job) {
  bool watch = false;
  {
    const std::lock_guard guard(lock_);
    waiting_.push_back(std::move(job));
    if (!runner_) return begin();
    watch = !std::exchange(is_watched_, true);
  }
  if (watch) CallbackExecutor::of_process().watch(shared_from_this());
}

void CallbackLane::serve(const std::shared_ptr<Runner>& me) {
  of_thread = &me;
  std::unique_lock guard(lock_);
  me->rest.emplace(ThreadRest::this_thread());
  while (runner_ == me && !waiting_.empty()) {
    auto job = std::move(waiting_.front());
    waiting_.pop_front();
    me->began = steady_clock().now();
    guard.unlock();
    run_callback(job);
    job = nullptr;
    me->children = nullptr;
    guard.lock();
  }
  if (runner_ == me) runner_ = nullptr;
  of_thread = nullptr;
}

bool CallbackLane::look(TimePoint now) {
  const std::lock_guard guard(lock_);
  if (waiting_.empty() || !runner_) return is_watched_ = false;
  if (runner_->stands_still(now)) begin();
  return true;
}

bool CallbackLane::runs_on_this_thread() {
  const std::lock_guard guard(lock_);
  return of_thread != nullptr && *of_thread == runner_;
}

namespace {

/// One of the system's files about a thread; empty if the thread has ended.
class ThreadFile {
 public:
  ThreadFile(pid_t thread, const char* name) {
    const auto path = "/proc/self/task/" + std::to_string(thread) + "/" + name;
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    const auto length = file ? ::read(file.get(), text_.data(), text_.size() - 1) : -1;
    length_ = length > 0 ? static_cast<std::size_t>(length) : 0;
  }
  std::string_view text() const { return {text_.data(), length_}; }  // a zero follows

 private:
  std::array<char, 4096> text_{};
  std::size_t length_ = 0;
};

/// How often the thread has gone to sleep, where it sleeps now; -1 where it does not, or has ended.
std::int64_t switches_of_sleeper(pid_t thread) {
  const ThreadFile file(thread, "status");
  const std::string_view all = file.text();
  constexpr std::string_view kState = "\nState:\t", kSwitches = "\nvoluntary_ctxt_switches:\t";
  const auto state = all.find(kState), switches = all.find(kSwitches);
  if (state == all.npos || switches == all.npos || all[state + kState.size()] != 'S') return -1;
  return std::strtoll(all.data() + switches + kSwitches.size(), nullptr, 10);
}

/// For how long the thread has had a core or waited for one, in nanoseconds; -1 where it is not
/// known.
std::int64_t time_awake(pid_t thread) {
  const ThreadFile file(thread, "schedstat");
  if (file.text().empty()) return -1;
  char* next = nullptr;
  const auto ran = std::strtoll(file.text().data(), &next, 10);
  return ran + std::strtoll(next, nullptr, 10);
}

}  // namespace

pid_t ThreadRest::this_thread() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

Duration ThreadRest::asleep_for(TimePoint now) {
  const auto switches = switches_of_sleeper(thread_);
  if (switches < 0 || switches != switches_) {
    switches_ = switches;
    since_ = now;
  }
  return now - since_;
}

Duration ThreadRest::idle_for(TimePoint now) {
  const auto awake = time_awake(thread_);
  if (awake < 0 || awake_ < 0 || std::chrono::nanoseconds(awake - awake_) * 4 > now - idle_since_) {
    awake_ = awake;
    idle_since_ = now;
  }
  return now - idle_since_;
}

bool ThreadRest::stands_still(TimePoint now, TimePoint began, Duration asleep) {
  const bool idle = idle_for(now) >= tunables().callback_idle;  // each look counts
  return asleep_for(now) >= asleep || idle || now - began >= tunables().callback_longest;
}

std::optional<const void*> ThreadRest::sleeps_on() const {
  const ThreadFile file(thread_, "syscall");
  if (file.text().empty()) return std::nullopt;
  // "202 0x7f22e4000ba0 0x189 0x0 0x0 ...": the call and its arguments, or "running".
  char* next = nullptr;
  const long call = std::strtol(file.text().data(), &next, 10);
  const auto word = std::strtoull(next, &next, 16);
  const auto operation = std::strtoull(next, &next, 16) & FUTEX_CMD_MASK;
  std::strtoull(next, &next, 16);  // the value that the word had
  const auto limit = std::strtoull(next, &next, 16);
  const bool on_condition = call == SYS_futex && operation == FUTEX_WAIT_BITSET && limit == 0;
  return on_condition ? reinterpret_cast<const void*>(word) : nullptr;  // NOLINT
}

}  // namespace muster
