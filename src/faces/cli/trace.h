/// `muster trace` and `muster top`: what the ranks of a job called last, merged; who is behind.
#pragma once

#include <string>
#include <vector>

#include "core/trace/analysis.h"

namespace muster::cli {

/// Arguments after `trace`. Prints the summary to standard output, writes the timeline where asked;
/// returns the exit code.
int run_trace(const std::vector<std::string>& arguments);
/// Arguments after `top`.
int run_top(const std::vector<std::string>& arguments);

/// Chrome's and Perfetto's trace format: a process per rank, a track per group.
std::string timeline_json(const trace::JobTrace& job);
/// One page that needs nothing else: the headline, a table per rank, the calls as bars.
std::string timeline_page(const trace::JobTrace& job);
/// The table of `muster top`.
std::string top_table(const trace::JobTrace& job);

}  // namespace muster::cli
