// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/time/clock.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
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
  // Never destroyed: threads of the engine may still look at it while the process exits. And
  // without a guard: a child that is forked while another thread first comes here would wait for it
  // for ever.
  static constinit std::atomic<const SteadyClock*> clock{nullptr};
  if (const SteadyClock* made = clock.load(std::memory_order_acquire)) return *made;
  auto mine = std::make_unique<const SteadyClock>();
  const SteadyClock* others = nullptr;
  if (!clock.compare_exchange_strong(others, mine.get(), std::memory_order_acq_rel)) return *others;
  return *mine.release();
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
