/// Where all time comes from. Real code uses `steady_clock()`; a simulated job hands in a clock
/// that moves only when the simulator says so.
#pragma once

#include <chrono>
#include <string>

namespace muster {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

class Clock {
 public:
  virtual ~Clock() = default;
  /// Thread-safe.
  virtual TimePoint now() const = 0;
};

/// The host's monotonic clock. Lives for ever.
const Clock& steady_clock();

/// `now + timeout`, or the end of time where the sum would overflow or `timeout` is negative (no
/// limit).
TimePoint deadline_after(const Clock& clock, Duration timeout);

/// What is left until `deadline`, as a timeout: zero once it has passed, negative (no limit) for
/// the end of time.
Duration time_left(const Clock& clock, TimePoint deadline);

/// "350 us", "2.5 s", "30 min": for messages that a person reads.
std::string describe(Duration duration);

}  // namespace muster
