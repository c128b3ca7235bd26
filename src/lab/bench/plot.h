// SPDX-License-Identifier: BSD-3-Clause
/// The results of a benchmark as a picture.
#pragma once

#include <string>
#include <vector>

#include "faces/cli/bench/results.h"

namespace muster::lab {

/// SVG: a panel for each operation and number of ranks, a line for each library (for each of its
/// memories, if it has several), both axes logarithmic.
std::string plot(const std::vector<cli::bench::Row>& rows);

}  // namespace muster::lab
