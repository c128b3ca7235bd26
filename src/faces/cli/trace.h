// SPDX-License-Identifier: BSD-3-Clause
/// `muster trace`: the last calls of the ranks of a job. `muster top` and `muster dash` show some
/// of the same.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/trace/analysis.h"

namespace muster::cli {

/// Chrome's and Perfetto's trace format: a process per rank, a track per group.
std::string timeline_json(const trace::JobTrace& job);
/// One page that needs nothing else: the headline, a table per rank, the calls as bars.
std::string timeline_page(const trace::JobTrace& job);
/// The job, who holds it up, and for each rank its state, rates, last call and the call that it is
/// in.
nlohmann::json report_of(const trace::JobTrace& job, const std::vector<std::string>& notes);
/// The same as one line.
std::string report_json(const trace::JobTrace& job, const std::vector<std::string>& notes);

/// The call that a rank has been in longest; null if it is in none.
const trace::Record* in_flight(const trace::RankTrace& rank);
/// For how long others have waited for each rank that is behind. Waits that a healthy job has too
/// (`Holdup::usual`) do not count.
std::map<int, std::int64_t> nanoseconds_behind(const trace::JobTrace& job,
                                               const std::vector<trace::Holdup>& holdups);
/// Rates and shares of time are those of so many nanoseconds.
inline constexpr std::int64_t kRateWindow = 5'000'000'000;

}  // namespace muster::cli
