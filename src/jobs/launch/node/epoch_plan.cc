// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/epoch_plan.h"

namespace muster::launch {

std::vector<int> slots_of(const EpochPlan& plan, const std::vector<int>& ranks) {
  std::vector<NodeFacts> facts;
  for (const NodeDetails& node : plan.nodes) facts.push_back(node.facts);
  std::vector<int> slots;
  for (const int rank : ranks) {
    const int node = node_of_rank(facts, rank);
    if (node >= 0) slots.push_back(plan.epoch.members[static_cast<std::size_t>(node)].slot);
  }
  return slots;
}

}  // namespace muster::launch
