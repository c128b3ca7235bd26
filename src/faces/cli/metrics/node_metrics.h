// SPDX-License-Identifier: BSD-3-Clause
/// Looks at this node's ranks for `muster run --metrics`: at their traces, as `muster top` does,
/// at the size of their processes, and at what the launcher counts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "core/trace/analysis.h"
#include "faces/cli/metrics/call_totals.h"
#include "faces/cli/metrics/families.h"
#include "faces/cli/metrics/time_allowance.h"
#include "jobs/launch/node_numbers.h"
#include "muster/clock.h"

namespace muster::cli {

/// Used by one thread.
class NodeMetrics {
 public:
  explicit NodeMetrics(std::shared_ptr<const launch::NodeNumbers> numbers);
  /// Adds what the ranks have called since the last look to the sums.
  void look();
  /// The page, after a look; the last one where those who ask again and again have used up the
  /// share of the launcher's time that there is for them.
  std::string page();

 private:
  std::string new_page();
  void read_traces(const launch::NodeNumbers::Values& numbers);
  void find_traces(const launch::NodeNumbers::Values& numbers);

  const std::shared_ptr<const launch::NodeNumbers> numbers_;
  // Read once: the launcher changes the environment while this object's thread runs.
  const std::string run_directory_;
  const std::int64_t since_ns_;         // no trace of this job is older
  std::string directory_;               // of the traces; empty: not found yet
  std::int64_t epoch_ = -1;             // in which it was found
  launch::NodeNumbers::Values seen_;    // at the last look
  std::set<std::int64_t> judged_pids_;  // workers whose traces were looked for last
  std::int64_t judged_ns_ = 0;          // when that was
  std::optional<trace::JobTrace> job_;
  CallTotals totals_;
  std::uint64_t refused_ = 0;
  Duration looking_{0};
  TimeAllowance allowance_;
  std::string page_;
};

}  // namespace muster::cli
