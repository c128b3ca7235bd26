// SPDX-License-Identifier: BSD-3-Clause
/// Finds workers that stand still (SIGSTOP, a debugger) for too long after a repair: the ranks of
/// the new epoch wait for each of them. Pure.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "muster/clock.h"

namespace muster::launch {

class StoppedWorkers {
 public:
  /// A worker that was stopped in all looks for `limit` is to be ended.
  explicit StoppedWorkers(Duration limit) : limit_(limit) {}

  /// A repair: from now on workers are looked at, until none is stopped.
  void begin(TimePoint now) {
    since_.clear();
    next_ = now + limit_ / kChecksInLimit;
  }
  /// When to look next; max: never.
  TimePoint next() const { return next_; }
  /// `stopped`: local ranks of the workers that stand still now. Gives those that are to be ended,
  /// once each.
  std::vector<int> look(TimePoint now, const std::set<int>& stopped);

 private:
  static constexpr int kChecksInLimit = 8;  // limit: a worker is stopped for 1/8 longer at most

  const Duration limit_;
  TimePoint next_ = TimePoint::max();
  std::map<int, TimePoint> since_;  // when each was first seen to stand still
};

}  // namespace muster::launch
