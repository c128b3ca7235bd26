// SPDX-License-Identifier: BSD-3-Clause
/// An epoch of the job as one of its nodes carries it out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jobs/launch/node/node_details.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/membership/membership.h"
#include "muster/status.h"

namespace muster::launch {

/// An epoch from the view of one node's workers.
struct EpochPlan {
  membership::Epoch epoch;
  std::vector<NodeDetails> nodes;  ///< in the order of their slots
  int node = -1;                   ///< this node's index in `nodes`, GROUP_RANK; -1: it has no seat
  int slot = -1;                   ///< stays the same as long as it has a seat
  std::int64_t joined = 0;         ///< the epoch in which it got that seat; 0: it has none
  /// It has a seat, and another node got its own in an earlier epoch: that one ran the program
  /// before this node did.
  bool joined_later = false;
};

/// A node as it finds itself among the members of an epoch.
struct OwnPlace {
  std::string name;         ///< of its hold
  std::string incarnation;  ///< as in NodeReport; counts if a member says one
  int workers = 0;
};

/// Code::mismatch if a member cannot be read, or this node's has another number of workers.
Result<EpochPlan> plan_of(const membership::Epoch& epoch, const OwnPlace& own);
/// Whether an epoch has a member of this incarnation, which is not empty.
bool has_member(const membership::Epoch& epoch, const std::string& incarnation);
/// Whether `next` differs from `epoch` by nodes that have joined, and by no restart.
bool only_adds_nodes(const membership::Epoch& epoch, const membership::Epoch& next);

/// The slots of the nodes that these ranks are on, each once for each rank.
std::vector<int> slots_of(const EpochPlan& plan, const std::vector<int>& ranks);

}  // namespace muster::launch
