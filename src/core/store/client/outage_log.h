// SPDX-License-Identifier: BSD-3-Clause
/// How often a client says that it cannot reach its store: once, then at growing distances until it
/// has reached it, however many attempts that takes.
#pragma once

#include <algorithm>
#include <mutex>

#include "muster/clock.h"

namespace muster::store {

/// Thread-safe.
class OutageLog {
 public:
  /// When an attempt that began at `begin` says it.
  TimePoint due_at(TimePoint begin, Duration patience) {
    const std::lock_guard lock(mutex_);
    since_ = std::min(since_, begin);
    return next_ == TimePoint{} ? since_ + patience : next_;
  }
  /// True: to be said now, by this caller alone. `lasted`: how long the outage has.
  bool say(TimePoint begin, TimePoint now, Duration patience, Duration& lasted) {
    if (now < due_at(begin, patience)) return false;
    const std::lock_guard lock(mutex_);
    if (now < next_) return false;
    lasted = now - since_;
    next_ = now + std::max(kFirstDistance, lasted);
    return true;
  }
  void reached() {
    const std::lock_guard lock(mutex_);
    since_ = TimePoint::max();
    next_ = TimePoint{};
  }

 private:
  static constexpr Duration kFirstDistance = std::chrono::seconds(30);  // limit: pace of warnings

  std::mutex mutex_;
  TimePoint since_ = TimePoint::max();  // max: there is no outage
  TimePoint next_{};                    // zero: nothing has been said of it
};

}  // namespace muster::store
