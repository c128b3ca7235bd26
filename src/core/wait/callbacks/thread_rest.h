/// Whether another thread of this process stands still.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "muster/clock.h"

namespace muster {

/// One observer's view of one thread: not for several observers at once.
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
