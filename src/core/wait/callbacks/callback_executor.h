/// Threads for user code.
///
/// A callback may compute, sleep, take locks, wait for other calls, or never return. It
/// never runs on a thread that advances calls or checks deadlines, nor under a muster lock, but on
/// these dedicated threads.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
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

  /// After it, `run` always finds a thread. Code::exhausted where none can be started.
  Status prepare();
  /// Runs `job` soon, on a thread of its own, and destroys it there. Jobs begin in the order in
  /// which they came. What a job throws is logged.
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
  std::mutex lock_;
  std::condition_variable changed_, over_;
  std::deque<Job> jobs_;
  std::vector<std::weak_ptr<WatchedQueue>> watched_;
  Duration period_ = Duration::max();  // the shortest of the watched
  int idle_ = 0;
  std::vector<pthread_t> running_;
  std::function<bool()> usable_;  // null: before the end
};

/// Runs `callback()`; what it throws is logged.
void run_callback(const std::function<void()>& callback);

}  // namespace muster
