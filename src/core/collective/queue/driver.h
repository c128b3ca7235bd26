// SPDX-License-Identifier: BSD-3-Clause
/// Driving the calls of one communicator: the interface that its parts use, the thread that has
/// promised to drive, and the callbacks of threads that wait.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/collective/group_context.h"
#include "core/collective/queue/progress.h"
#include "core/tunables/tunables.h"
#include "muster/clock.h"

namespace muster::collective {

/// The communicator as its parts see it.
class Driver : public Progressable {
 public:
  /// Drives all of the communicator's work on this thread until `done()`; returns false if `limit`
  /// passes first.
  virtual bool drive_until(const std::function<bool()>& done, TimePoint limit) = 0;
  /// For a thread that polls between its own work: advances as far as possible. The progress thread
  /// then stays away for `driver_trust`.
  virtual void poll_between_compute() = 0;
  /// This thread is done with work that may have blocked others without driving the communicator.
  virtual void notify_progress_thread() = 0;
};

/// Whether a thread that has promised to drive calls between its own work still runs, or is blocked
/// and needs help. Thread-safe. If several threads have promised, only the last one counts.
class DrivingThread {
 public:
  /// The calling thread is the driver and drives now.
  void note_driving(TimePoint now) {
    clockid_t clock{};
    if (::pthread_getcpuclockid(::pthread_self(), &clock) != 0) clock = kNoClock;
    clock_.store(clock);
    used_.store(used(clock));
    seen_.store(now);
  }

  bool is_this_thread() const {
    clockid_t clock{};
    return ::pthread_getcpuclockid(::pthread_self(), &clock) == 0 && clock_.load() == clock;
  }

  /// Whether it was here recently, or used its core for at least a quarter of the time since it was
  /// last seen.
  bool is_running(TimePoint now) {
    const TimePoint seen = seen_.load();
    if (now < seen + tunables().driver_trust) return true;
    const Duration used_now = used(clock_.load()), before = used_.exchange(used_now);
    if ((used_now - before) * 4 < now - seen) return false;
    seen_.store(now);
    return true;
  }

 private:
  static constexpr clockid_t kNoClock = -1;  // no thread

  /// Processor time; zero for a thread that has ended.
  static Duration used(clockid_t clock) {
    timespec time{};
    if (::clock_gettime(clock, &time) != 0) return {};
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }

  // Three values that are not read as one: a mixture of two drivers' only shortens or lengthens the
  // trust until the next look.
  std::atomic<clockid_t> clock_{kNoClock};
  std::atomic<Duration> used_{Duration{}};
  std::atomic<TimePoint> seen_{TimePoint{}};
};

/// Callbacks that threads want called while they wait in a communicator. Thread-safe. A callback
/// runs only on the thread that added it, so it may terminate that thread.
class IdleCallbacks {
 public:
  using Callback = std::function<void()>;

  void add(const Callback& callback) {
    const std::lock_guard guard(lock_);
    callbacks_.emplace_back(std::this_thread::get_id(), &callback);
    count_.store(callbacks_.size());
  }
  void remove(const Callback& callback) {
    const std::lock_guard guard(lock_);
    std::erase_if(callbacks_, [&](const auto& entry) { return entry.second == &callback; });
    count_.store(callbacks_.size());
  }

  /// Runs this thread's callbacks. Returns whether there are any.
  bool run() const {
    if (count_.load(std::memory_order_relaxed) == 0)
      return false;  // this thread always sees its own additions
    std::vector<const Callback*> mine;
    {
      const std::lock_guard guard(lock_);
      for (const auto& [thread, callback] : callbacks_)
        if (thread == std::this_thread::get_id()) mine.push_back(callback);
    }
    for (const Callback* callback : mine) (*callback)();
    return !mine.empty();
  }

 private:
  mutable std::mutex lock_;  // guards `callbacks_`; no callback runs under it
  std::vector<std::pair<std::thread::id, const Callback*>> callbacks_;
  std::atomic<std::size_t> count_{0};  // their number, read without the lock
};

/// Adds `callback` until the returned scope is destroyed. The scope keeps `owner`, which contains
/// `callbacks`, alive.
template <class Owner>
std::shared_ptr<void> idle_scope(std::shared_ptr<Owner> owner, IdleCallbacks& callbacks,
                                 IdleCallbacks::Callback callback) {
  struct IdleScope {
    IdleScope(std::shared_ptr<Owner> in, IdleCallbacks& all, IdleCallbacks::Callback what)
        : owner(std::move(in)), callbacks(all), callback(std::move(what)) {
      callbacks.add(callback);
    }
    ~IdleScope() { callbacks.remove(callback); }
    const std::shared_ptr<Owner> owner;
    IdleCallbacks& callbacks;
    const IdleCallbacks::Callback callback;
  };
  return std::make_shared<IdleScope>(std::move(owner), callbacks, std::move(callback));
}

}  // namespace muster::collective
