/// What `muster/clock.h` leaves to the engine: a clock that costs little, and deadlines that pass
/// while this process stands still.
#pragma once

#include <cstdint>

#include "muster/clock.h"

namespace muster {

#if defined(__x86_64__)
namespace quick_clock_detail {
/// A moment on the clock and the counter.
struct Anchor {
  std::uint64_t ticks = 0;
  std::int64_t nanoseconds = 0;
  std::uint64_t rate = 0;   // nanoseconds for 2^32 ticks; 0: not known
  std::uint64_t valid = 0;  // so many ticks from there on
};
inline constinit thread_local Anchor anchor;
/// Asks the clock, and goes on from there.
TimePoint look_again();
}  // namespace quick_clock_detail
#endif

/// `steady_clock().now()` for who asks it millions of times a second, in a third of the time that
/// the C library takes, and some microseconds off at most, so one that follows another may be that
/// much earlier. Where the kernel takes its time from the processor's counter (its own word that
/// the counter runs evenly, on all cores alike), this reads that counter, held against the clock
/// every ten milliseconds, for each thread by itself. Elsewhere it is the clock. For times that are
/// written down or waited for.
inline TimePoint quick_now() {
#if defined(__x86_64__)
  const auto& anchor = quick_clock_detail::anchor;
  const std::uint64_t since = __builtin_ia32_rdtsc() - anchor.ticks;
  if (since >= anchor.valid) [[unlikely]]
    return quick_clock_detail::look_again();
  return TimePoint(
      Duration(anchor.nanoseconds + static_cast<std::int64_t>(since * anchor.rate >> 32)));
#else
  return steady_clock().now();
#endif
}

// Deadlines of others that pass while this process stands still (SIGSTOP, a suspended machine, no
// core). A deadline that is noticed late proves nothing about others: they may have stood still
// too, or could not reach this process. They get time again, but only so often in a row: a process
// that is late at every look would never judge anybody.

inline constexpr int kExcusedPauses = 3;  // limit: pauses of several processes, one after another

/// The pauses that have put off one deadline.
class OwnPauses {
 public:
  /// This process stood still: whether that puts the deadline off.
  bool excuse() {
    if (excused_ >= kExcusedPauses) return false;
    ++excused_;
    return true;
  }
  /// Whether a deadline that is noticed `late` is put off. No process that runs is later than
  /// `slack`.
  bool excuse(Duration late, Duration slack) { return late > slack && excuse(); }
  /// The deadline begins anew, or was looked at in time.
  void reset() { excused_ = 0; }

 private:
  int excused_ = 0;
};

}  // namespace muster
