// SPDX-License-Identifier: BSD-3-Clause
/// Threads for user code.
///
/// A callback may compute, sleep, take locks, wait for other calls, or never return. It
/// never runs on a thread that advances calls or checks deadlines, nor under a muster lock, but on
/// these dedicated threads.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Thread-safe. A job that waits for another never keeps it waiting, to any depth: before a thread
/// begins a job it sees to it that another one waits for the next. Threads that are not needed for
/// some seconds end, down to one, which sleeps.
class CallbackExecutor {
 public:
  using Job = std::function<void()>;

  /// The process's own; a forked child has another. Never destroyed.
  static CallbackExecutor& of_process();

  /// After it, `run` always finds a thread. Code::exhausted if none can be started.
  Status prepare();
  /// Runs `job` soon, on a thread of its own, and destroys it there. Jobs begin in the order in
  /// which they came. An exception of a job is logged.
  void run(Job job);

  /// From here on the calling thread is one that others need: `spares_this_thread` tells those who
  /// would destroy what may hold objects of the user's.
  static void spare_this_thread();
  static bool spares_this_thread();

  /// Something whose state a thread that has no job looks at.
  class WatchedQueue {
   public:
    virtual ~WatchedQueue() = default;
    /// False: need not be looked at any more.
    virtual bool look(TimePoint now) = 0;
    /// At least how often.
    virtual Duration period() const;
  };
  /// Looks at it until it is destroyed or `look` says so.
  void watch(const std::shared_ptr<WatchedQueue>& what);

  /// The process ends: waits until no job is left, `limit` at most, and begins none from then on
  /// once `usable()` is false, asked before each. Whether none was left.
  bool finish(Duration limit, std::function<bool()> usable);
  /// False once `finish` lets no job begin any more.
  bool begins_jobs();
  /// The threads that run a job now.
  std::vector<pthread_t> running_threads();

 private:
  CallbackExecutor() = default;
  bool add_thread();
  void work();
  bool rest(std::unique_lock<std::mutex>& guard);
  /// Under the lock.
  bool may_begin() const { return !usable_ || usable_(); }
  void look_after(std::unique_lock<std::mutex>& guard);

  const ProcessMark process_;
  const CallbackExecutor* parents_ =
      nullptr;  // in a forked child: keeps what it holds from looking lost
  // Guards all below. Released while a job runs and is destroyed, and during `look`, so all of them
  // may call back. `usable_` is called under it.
  std::mutex lock_;
  std::condition_variable changed_, over_;
  std::deque<Job> jobs_;
  std::vector<std::weak_ptr<WatchedQueue>> watched_;  // empty while one thread looks at all
  Duration period_ = Duration::max();                 // the shortest of the watched
  // Threads that hold no job, those that are starting included. A thread that takes a job replaces
  // itself first if it was the last, so a job that blocks keeps no other waiting.
  int idle_ = 0;
  std::vector<pthread_t> running_;
  std::function<bool()> usable_;  // null: before the end
};

/// Runs `callback()`; what it throws is logged.
void run_callback(const std::function<void()>& callback);

/// Runs jobs one after another, on threads of the CallbackExecutor, so that what they start is
/// started in the same order on every rank that gives the same jobs. A job that sleeps for 200 ms,
/// polls between short sleeps for 1 s, or runs for 10 s while others wait, and not because of
/// something that `Busy` tells of, may wait for what a later one does: then the next ones run
/// beside it. Thread-safe; held by shared pointers.
class CallbackLane final : public CallbackExecutor::WatchedQueue,
                           public std::enable_shared_from_this<CallbackLane> {
 public:
  void run(CallbackExecutor::Job job);
  bool look(TimePoint now) override;
  /// Whether the calling thread runs the lane's job: what waits behind that does not come before it
  /// returns.
  bool runs_on_this_thread();

  /// For what comes of the job that the calling thread runs: a lane of its own, or what waits for
  /// it would wait for ever. Null on a thread that runs no job of a lane.
  static std::shared_ptr<CallbackLane> of_this_job();

  struct Runner;
  /// While one lives, the job that ran on the thread where it was made is known to wait for
  /// something that comes.
  class Busy {
   public:
    Busy();
    ~Busy();
    Busy(Busy&&) noexcept = default;
    Busy& operator=(Busy&&) = delete;

   private:
    std::shared_ptr<Runner> runner_;
  };

 private:
  static thread_local const std::shared_ptr<Runner>* of_thread;

  void begin();
  void serve(const std::shared_ptr<Runner>& me);

  std::mutex lock_;  // guards all below; the executor's lock may be taken under it, never above it
  std::deque<CallbackExecutor::Job> waiting_;
  // The runner that takes the next job; null: no callback runs. A runner that stands still is
  // replaced here, and ends with its job.
  std::shared_ptr<Runner> runner_;
  bool is_watched_ = false;
};

/// Whether another thread of this process stands still. One observer's view of one thread: not for
/// several observers at once.
class ThreadRest {
 public:
  explicit ThreadRest(pid_t thread) : thread_(thread) {}
  /// The calling thread.
  static pid_t this_thread();

  /// How long the thread has slept without waking once, as far as the calls of this function tell:
  /// the first gives zero. A thread that waits for a core does not sleep, nor does one that waits
  /// for Python's interpreter, which wakes every 5 ms.
  Duration asleep_for(TimePoint now);
  /// How long it has been awake, or waited for a core, for less than a quarter of the time, as far
  /// as the calls of this function tell. So is a thread that polls for something between sleeps.
  Duration idle_for(TimePoint now);
  /// Whether it may wait for what others do: it has slept for so long, polls between short sleeps,
  /// or has done nothing else since `began`, long ago (callback_idle, callback_longest).
  bool stands_still(TimePoint now, TimePoint began, Duration asleep);
  /// The word in memory that it sleeps on without a limit of time, as in a condition variable; null
  /// where it does not, absent where the system does not tell.
  std::optional<const void*> sleeps_on() const;
  pid_t thread() const { return thread_; }

 private:
  pid_t thread_;
  std::int64_t awake_ = -1;  // how long it had been when it became idle
  TimePoint idle_since_{};
  std::int64_t switches_ = -1;  // how often it had gone to sleep
  TimePoint since_{};
};

}  // namespace muster
