/// How the agents of a job find each other: the store that node 0's agent serves, and the
/// membership that it keeps.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/security/secret.h"
#include "core/store/factory.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/node/reserved_port.h"
#include "jobs/launch/options.h"

namespace muster::launch {

/// The secret that the job's connections prove: the user's (MUSTER_SECRET, MUSTER_SECRET_FILE,
/// MUSTER_INSECURE), that of the launcher whose worker this is, or, with one node, a fresh random
/// one. Several nodes without any: an error on those that are not on the host of `master`; on that
/// host its own secret, which reaches this user's processes there only.
Result<Secret> job_secret(const RunOptions& options);

/// A job as an agent sees it before it knows of other nodes.
struct NodeJob {
  std::shared_ptr<store::TcpStore> store;  ///< null where the agent serves none
  bool hosts_store = false;
  NodeFacts self;
  std::string launcher;     ///< "host, process 77": which one of several on a host
  std::string master_addr;  ///< of the store
  std::uint16_t master_port = 0;
  /// MASTER_ADDR and MASTER_PORT of the workers, if rank 0 is on this node.
  std::string program_addr;
  std::uint16_t program_port = 0;
  std::shared_ptr<const ReservedPort> reserved;  ///< while the port is the agent's choice
  std::string run_id;
};

/// Serves the job's store or connects to it: with `static` the node of rank 0 serves, with `c10d`
/// whoever can listen at the endpoint. Blocks until the store is there or `options.join_timeout`
/// has passed.
Result<NodeJob> open_job(const RunOptions& options, const Secret& secret);

/// Its place among the nodes (`node_membership.h`), in a job of several.
Result<std::unique_ptr<NodeMembership>> join_nodes(const RunOptions& options, const NodeJob& job,
                                                   const Secret& secret);

}  // namespace muster::launch
