// SPDX-License-Identifier: BSD-3-Clause
/// Ranks as real processes of a test: forked, watched, and reporting one text each.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/clock.h"

namespace muster::testing {

/// How one of them ended.
struct RankEnd {
  std::string report;  ///< what its body returned; empty where it did not get that far
  int wait_status = 0;
  bool killed_at_the_limit = false;
};

class RankProcesses {
 public:
  /// Forks `count` children that run `body(rank)` and leave with 0 once its text is handed over.
  /// The caller must have no other threads.
  RankProcesses(int count, const std::function<std::string(int)>& body);
  /// Kills the ranks that are left.
  ~RankProcesses();

  pid_t pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }
  void kill(int rank, int signal);
  /// Waits until every child has ended or `limit` has passed; then kills the rest. Ends in rank
  /// order.
  std::vector<RankEnd> join(Duration limit);

 private:
  struct Child {
    pid_t pid = -1;
    Descriptor report;
    std::optional<RankEnd> end;
  };
  std::vector<Child> children_;
};

/// A counter that processes forked later share: how far the ranks have come, without messages.
class SharedCounter {
 public:
  SharedCounter();
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  void add(int amount);
  int value() const;
  /// Blocks until the counter has reached `value`; false at the limit.
  bool wait_for(int value, Duration limit);
  /// Nanoseconds on the host's monotonic clock, kept for others to read.
  void stamp(TimePoint at);
  TimePoint stamped() const;

 private:
  struct Shared;
  Shared* shared_;
};

}  // namespace muster::testing
