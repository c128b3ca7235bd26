// SPDX-License-Identifier: BSD-3-Clause
/// The source of all time. Real code uses `steady_clock()`; a simulated job passes a clock that
/// only the simulator advances.
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

/// The host's monotonic clock. Never destroyed.
const Clock& steady_clock();

/// `now + timeout`; TimePoint::max() if the sum would overflow or `timeout` is negative (no limit).
TimePoint deadline_after(const Clock& clock, Duration timeout);

/// The time until `deadline`, as a timeout: zero once it has passed, negative (no limit) for
/// TimePoint::max().
Duration time_left(const Clock& clock, TimePoint deadline);

/// For messages: "350 us", "2.5 s", "30 min".
std::string describe(Duration duration);

}  // namespace muster
