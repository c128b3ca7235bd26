// SPDX-License-Identifier: BSD-3-Clause
/// What a node says of itself besides its phase: `NodeReport::details`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jobs/launch/node/rank_assignment.h"
#include "muster/status.h"

namespace muster::launch {

/// A failure of a worker, as all nodes report it at the end.
struct FailureNote {
  std::int64_t epoch = 0;
  std::int64_t order = 0;  ///< numbers the failures of its node
  std::string text;        ///< "node 1 (host-b): rank 3 (local rank 1, ...) ended with exit code 3"
  friend bool operator==(const FailureNote&, const FailureNote&) = default;
};

/// The facts that this node publishes besides its phase.
struct NodeDetails {
  NodeFacts facts;
  std::string launcher;            ///< "host, process 77"
  std::string program_addr;        ///< MASTER_ADDR, if rank 0 is here
  std::uint16_t program_port = 0;  ///< MASTER_PORT
  /// The workers' store, if rank 0 is here; empty: one store serves all epochs.
  std::string store_addr{};
  std::uint16_t store_port = 0;
  std::vector<FailureNote> failures{};  ///< the last few
  std::string identity{};               ///< of its process, which no other one has
  std::string program{};                ///< that it starts, without arguments; for messages
};
std::string encode(const NodeDetails& details);
Result<NodeDetails> decode_node_details(const std::string& record);

}  // namespace muster::launch
