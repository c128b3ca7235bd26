/// The order in which callbacks of one kind run.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "core/wait/callbacks/callback_executor.h"

namespace muster {

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

  std::mutex lock_;
  std::deque<CallbackExecutor::Job> waiting_;
  std::shared_ptr<Runner> runner_;  // null: no callback runs
  bool is_watched_ = false;
};

}  // namespace muster
