/// The host's monotonic clock for who asks it millions of times a second: a third of what the C
/// library takes.
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

/// `steady_clock().now()`, some microseconds off at most, so one that follows another may be that
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

}  // namespace muster
