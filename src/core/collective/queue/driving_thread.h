/// Whether a thread that has promised to drive calls between its own work still runs, or is blocked
/// and needs help.
#pragma once

#include <pthread.h>

#include <atomic>
#include <ctime>

#include "core/tunables/tunables.h"
#include "muster/clock.h"

namespace muster::collective {

/// Thread-safe. If several threads have promised, only the last one counts.
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

  std::atomic<clockid_t> clock_{kNoClock};
  std::atomic<Duration> used_{Duration{}};
  std::atomic<TimePoint> seen_{TimePoint{}};
};

}  // namespace muster::collective
