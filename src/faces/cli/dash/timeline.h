// SPDX-License-Identifier: BSD-3-Clause
/// What a rank did in a span of time, as a character per part of it. Pure functions on values.
#pragma once

#include <cstdint>
#include <string>

#include "core/trace/analysis.h"

namespace muster::cli {

struct TimelineSpan {
  std::int64_t begin_ns = 0, end_ns = 0;
  int columns = 300;
};

/// The character of each column:
///   '0'         no call
///   '1' to '9'  the share of it with at least one call, in ninths, rounded up
///   'w'         a call is under way that has not ended by `now_ns`
///   'x'         a call failed in it
///   ' '         unknown: before the rank began, or before the first call that its trace still has
std::string timeline_columns(const trace::RankTrace& rank, const TimelineSpan& span,
                             std::int64_t now_ns);

}  // namespace muster::cli
