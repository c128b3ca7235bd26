#include "core/base/time/clock.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "muster/clock.h"

namespace muster {
namespace {

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace

const Clock& steady_clock() {
  // Never destroyed: threads of the engine may still look at it while the process exits.
  static const SteadyClock& clock = *new SteadyClock;
  return clock;
}

TimePoint deadline_after(const Clock& clock, Duration timeout) {
  const TimePoint now = clock.now();
  if (timeout < Duration::zero() || timeout > TimePoint::max() - now) return TimePoint::max();
  return now + timeout;
}

Duration time_left(const Clock& clock, TimePoint deadline) {
  if (deadline == TimePoint::max()) return Duration(-1);
  return std::max(deadline - clock.now(), Duration::zero());
}

std::string describe(Duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  char text[32];
  if (seconds >= 120) {
    std::snprintf(text, sizeof text, "%.4g min", seconds / 60);
  } else if (seconds >= 1) {
    std::snprintf(text, sizeof text, "%.4g s", seconds);
  } else if (seconds >= 1e-3) {
    std::snprintf(text, sizeof text, "%.4g ms", seconds * 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.4g us", seconds * 1e6);
  }
  return text;
}

}  // namespace muster

#if defined(__x86_64__)
namespace muster::quick_clock_detail {
namespace {

// How long a thread goes by the counter before it asks the clock again, and what it must have seen
// of both to know the counter's rate.
constexpr std::int64_t kTrusted = 10'000'000, kShortest = 5'000'000,
                       kLongest = 10'000'000'000;  // nanoseconds
// A thread that lost its core between its looks at the two has not seen one moment on both.
constexpr std::uint64_t kOneMoment = 5000;

bool kernel_trusts_counter() {
  static const bool trusted = [] {
    std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string name;
    return file >> name && name == "tsc";
  }();
  return trusted;
}

bool differs(std::uint64_t rate, std::uint64_t before) {
  const std::uint64_t difference = rate > before ? rate - before : before - rate;
  return difference > before / 1000;
}

}  // namespace

TimePoint look_again() {
  const std::uint64_t ticks = __builtin_ia32_rdtsc();
  const TimePoint now = steady_clock().now();
  if (!kernel_trusts_counter() || __builtin_ia32_rdtsc() - ticks > kOneMoment) {
    anchor.valid = 0;
    return now;
  }
  const std::int64_t nanoseconds = now.time_since_epoch().count(),
                     passed = nanoseconds - anchor.nanoseconds;
  const bool known =
      anchor.nanoseconds != 0 && ticks > anchor.ticks && passed >= 0 && passed <= kLongest;
  if (known && passed < kShortest)
    return now;  // valid is 0, or the anchor is younger than it: too early to tell the rate
  Anchor next{ticks, nanoseconds, 0, 0};
  if (known) {
    next.rate = static_cast<std::uint64_t>((static_cast<unsigned __int128>(passed) << 32) /
                                           (ticks - anchor.ticks));
    // A counter that has run differently meanwhile (a machine that was moved) has to prove itself
    // anew.
    const bool even = next.rate != 0 && (anchor.rate == 0 || !differs(next.rate, anchor.rate));
    if (even) next.valid = (static_cast<std::uint64_t>(kTrusted) << 32) / next.rate;
  }
  anchor = next;
  return now;
}

}  // namespace muster::quick_clock_detail
#endif
