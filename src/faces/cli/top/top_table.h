// SPDX-License-Identifier: BSD-3-Clause
/// The table of `muster top`. A pure function of the traces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/trace/analysis.h"

namespace muster::cli {

enum class TopOrder : std::uint8_t {
  rank,
  wait,   ///< the largest share of time in calls first
  calls,  ///< the most calls per second first
  bytes,  ///< the most bytes per second first
  late,   ///< who is behind first, then who has been in a call longest
};

struct TopStyle {
  TopOrder order = TopOrder::rank;
  std::size_t columns = 0;  ///< lines are cut to so many characters; 0: they are not
  bool colour = false;
};

std::string top_table(const trace::JobTrace& job, const TopStyle& style = {});

}  // namespace muster::cli
