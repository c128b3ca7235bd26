// SPDX-License-Identifier: BSD-3-Clause
/// An epoch of the job as one of its nodes carries it out.
#pragma once

#include <vector>

#include "jobs/launch/node/node_details.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/membership/membership.h"

namespace muster::launch {

/// An epoch from the view of one node's workers.
struct EpochPlan {
  membership::Epoch epoch;
  std::vector<NodeDetails> nodes;  ///< in the order of their slots
  int node = -1;                   ///< this node's index in `nodes`, GROUP_RANK; -1: it has no seat
  int slot = -1;                   ///< stays the same as long as it has a seat
};

/// The slots of the nodes that these ranks are on, each once for each rank.
std::vector<int> slots_of(const EpochPlan& plan, const std::vector<int>& ranks);

}  // namespace muster::launch
