/// What `muster trace` and `muster top` make of what the ranks of a job called last.
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
