// SPDX-License-Identifier: BSD-3-Clause
/// `muster-lab --simulate`: what the cost model (`lab/model/cost.h`) says of algorithms on
/// machines that are not here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/model/cost.h"
#include "muster/status.h"

namespace muster::lab {

struct Simulation {
  std::vector<std::string> ops;
  std::vector<std::uint64_t> sizes;
  std::vector<int> ranks;
  int ranks_per_host = 0;  ///< 0: as many as `hosts` says
  int hosts = 0;           ///< 0: as many as `ranks_per_host` says; both 0: a host for each rank
  collective::plan::Machine machine;
  bool play = false;  ///< also play the selected algorithm, message by message (`lab/model/play.h`)
  std::string json;   ///< rows are appended, one object a line
};

/// Prints a line for each operation, number of ranks and size: every algorithm's predicted time,
/// and which one selection picks.
Status simulate(const Simulation& simulation);

}  // namespace muster::lab
