// SPDX-License-Identifier: BSD-3-Clause
/// `muster trace` and `muster top`: they show the last calls of the ranks of a job.
#pragma once

#include <string>
#include <vector>

#include "core/trace/analysis.h"

namespace muster::cli {

/// Chrome's and Perfetto's trace format: a process per rank, a track per group.
std::string timeline_json(const trace::JobTrace& job);
/// One page that needs nothing else: the headline, a table per rank, the calls as bars.
std::string timeline_page(const trace::JobTrace& job);
/// The table of `muster top`.
std::string top_table(const trace::JobTrace& job);
/// One line: the job, who holds it up, and for each rank its state, rates, last call and the call
/// that it is in.
std::string report_json(const trace::JobTrace& job, const std::vector<std::string>& notes);

/// The call that a rank has been in longest; null if it is in none.
const trace::Record* in_flight(const trace::RankTrace& rank);
/// Rates and shares of time are those of so many nanoseconds.
inline constexpr std::int64_t kRateWindow = 5'000'000'000;

}  // namespace muster::cli
