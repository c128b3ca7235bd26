/// How the agents of a job find each other: the store that node 0's agent serves, and the nodes'
/// numbers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/secret.h"
#include "muster/key_value_store.h"
#include "muster/launch/options.h"
#include "muster/launch/rank_assignment.h"
#include "muster/launch/reserved_port.h"

namespace muster::launch {

/// The secret that the job's connections prove: the user's (MUSTER_SECRET, MUSTER_SECRET_FILE,
/// MUSTER_INSECURE), that of the launcher whose worker this is, or, with one node, a fresh random
/// one. Several nodes without any: an error on those that are not on the host of `master`; on that
/// host its own secret, which reaches this user's processes there only.
Result<Secret> job_secret(const RunOptions& options);

/// A job as an agent sees it once all nodes have come.
struct NodeJob {
  std::shared_ptr<store::Store> store;  ///< null where the agent serves none
  bool hosts_store = false;
  int node = 0;
  int host_node = 0;  ///< the node whose agent serves the store
  std::vector<NodeFacts> nodes;
  std::string master_addr;  ///< of the store
  std::uint16_t master_port = 0;
  std::string program_addr;  ///< MASTER_ADDR and MASTER_PORT of the workers: of rank 0's host
  std::uint16_t program_port = 0;
  std::shared_ptr<const ReservedPort>
      reserved;  ///< on that host, while the port is the agent's choice
  std::string run_id;
  std::string key_prefix;  ///< of the agents' own keys
};

/// Blocks until all nodes have come or `options.join_timeout` has passed; errors name the nodes
/// that are missing.
Result<NodeJob> join_nodes(const RunOptions& options, const Secret& secret);

}  // namespace muster::launch
