// SPDX-License-Identifier: BSD-3-Clause
/// A share of a thread's time for work that others ask for as often as they like. Pure values.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "muster/clock.h"

namespace muster::cli {

/// A tenth of the time, saved up for at most ten seconds.
class TimeAllowance {
 public:
  /// Whether there is any left. True the first time.
  bool has_any(TimePoint now) {
    if (asked_) left_ = std::min(left_ + (now - *asked_) / kShare, kMostSaved);
    asked_ = now;
    return left_ > Duration(0);
  }
  /// More than is left is a debt.
  void spend(Duration time) { left_ -= time; }

 private:
  static constexpr int kShare = 10;
  static constexpr Duration kMostSaved = std::chrono::seconds(1);
  Duration left_ = kMostSaved;
  std::optional<TimePoint> asked_;
};

}  // namespace muster::cli
