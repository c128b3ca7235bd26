// SPDX-License-Identifier: BSD-3-Clause
/// Deadlines of other processes that pass while this process stands still (SIGSTOP, a suspended
/// machine, no core).
///
/// A deadline that is noticed late proves nothing about others: they may have stood still too, or
/// could not reach this process. They get time again, but only so often in a row: a process that is
/// late at every look would never judge anybody.
#pragma once

#include "muster/clock.h"

namespace muster {

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
