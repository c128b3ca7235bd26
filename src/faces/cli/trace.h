// SPDX-License-Identifier: BSD-3-Clause
/// `muster trace` and `muster top`: they show the last calls of the ranks of a job.
#pragma once

#include <string>

#include "core/trace/analysis.h"

namespace muster::cli {

/// Chrome's and Perfetto's trace format: a process per rank, a track per group.
std::string timeline_json(const trace::JobTrace& job);
/// One page that needs nothing else: the headline, a table per rank, the calls as bars.
std::string timeline_page(const trace::JobTrace& job);
/// The table of `muster top`.
std::string top_table(const trace::JobTrace& job);

}  // namespace muster::cli
