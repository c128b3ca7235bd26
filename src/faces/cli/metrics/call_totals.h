// SPDX-License-Identifier: BSD-3-Clause
/// Sums over all calls of a node's ranks, made of repeated looks at their traces (`core/trace`).
/// Ranks pay nothing for it: they write the ring that they write anyway. Pure functions on values.
///
/// The ring of a rank holds its last 2,000 calls. A rank that makes more between two looks has
/// calls that no look saw; their number is exact, and the sums of the calls that were seen are
/// scaled up by it (`estimated`).
///
/// The seconds of a collective are split by comparing the ranks of this node: a rank waits until
/// the last of them has entered the call, and moves data from then on. Calls whose other members
/// are not seen (point-to-point, one rank of this node alone, forgotten by the ring) are not split.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/trace/analysis.h"

namespace muster::cli {

struct CallKind {
  int rank = 0;
  std::string group, operation;
  auto operator<=>(const CallKind&) const = default;
};

/// Sums of calls that have ended.
struct CallSums {
  double calls = 0, bytes = 0;
  double waiting = 0, moving = 0, unattributed = 0;  ///< seconds
  void add(const CallSums& more, double times);
};

/// The collectives that could be compared, and how long a rank entered them after the first of
/// this node.
struct LateSums {
  double calls = 0, seconds = 0;
};

class CallTotals {
 public:
  /// A look. Traces of other processes at the same ranks add to the same sums.
  void add(const trace::JobTrace& job);

  const std::map<CallKind, CallSums>& calls() const { return calls_; }
  /// By rank and group.
  const std::map<std::pair<int, std::string>, LateSums>& late() const { return late_; }
  /// By rank: calls whose kind, bytes and seconds are an estimate.
  const std::map<int, double>& estimated() const { return estimated_; }
  const std::map<int, double>& failures() const { return failures_; }

 private:
  // A trace from its beginning: which of its calls are in the sums.
  struct Counted {
    std::uint64_t last = 0;             // ticket
    std::set<std::uint64_t> under_way;  // tickets up to `last`
    std::uint64_t ended = 0, failures = 0;
  };
  class EntryTimes;
  void add(const trace::RankTrace& trace, const EntryTimes& entries);

  std::map<std::tuple<std::string, std::int64_t, std::int64_t>, Counted> traces_;
  std::map<CallKind, CallSums> calls_;
  std::map<std::pair<int, std::string>, LateSums> late_;
  std::map<int, double> estimated_, failures_;
};

}  // namespace muster::cli
