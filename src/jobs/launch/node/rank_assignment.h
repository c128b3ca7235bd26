// SPDX-License-Identifier: BSD-3-Clause
/// Assigns ranks to workers. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "muster/status.h"

namespace muster::launch {

/// A node's description of itself.
struct NodeFacts {
  int workers = 1;
  std::string role = "default";
  std::string host;
  int max_restarts = 0;
};

/// The ranks of one worker: RANK, LOCAL_RANK, ...
struct WorkerRanks {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int group_rank = 0;  ///< the node's
  int group_world_size = 1;
  int role_rank = 0;  ///< among the workers of the same role
  int role_world_size = 1;
  friend bool operator==(const WorkerRanks&, const WorkerRanks&) = default;
};

/// The workers of node `node`. Ranks run through the nodes in order; nodes may have different
/// numbers of workers and different roles.
std::vector<WorkerRanks> assign_ranks(const std::vector<NodeFacts>& nodes, int node);
/// The node that a rank runs on; -1 for none.
int node_of_rank(const std::vector<NodeFacts>& nodes, int rank);

/// For the store.
std::string encode(const NodeFacts& facts);
Result<NodeFacts> decode_node_facts(const std::string& record);

}  // namespace muster::launch
