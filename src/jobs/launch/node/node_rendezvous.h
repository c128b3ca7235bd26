// SPDX-License-Identifier: BSD-3-Clause
/// How the launchers of a job find each other: the store that node 0's launcher serves, and the
/// membership that it keeps; and a node whose workers another program starts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/security/secret.h"
#include "core/store/factory.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/options.h"

namespace muster::launch {

class JoinDoor;

/// The secret that the job's connections prove: the user's (MUSTER_SECRET, MUSTER_SECRET_FILE,
/// MUSTER_INSECURE), that of the launcher whose worker this is, or, with one node, a fresh random
/// one. Several nodes without any: an error on those that are not on the host of `master`; on that
/// host its own secret, which reaches this user's processes there only.
Result<Secret> job_secret(const RunOptions& options);

/// A job as a launcher sees it before it knows of other nodes.
struct NodeJob {
  std::shared_ptr<store::TcpStore> store;  ///< null where the launcher serves none
  bool hosts_store = false;
  NodeFacts self;
  std::string launcher;     ///< "host, process 77": which one of several on a host
  std::string master_addr;  ///< of the store
  std::uint16_t master_port = 0;
  /// MASTER_ADDR and MASTER_PORT of the workers, if rank 0 is on this node.
  std::string program_addr;
  std::uint16_t program_port = 0;
  std::shared_ptr<const ReservedPort> reserved;  ///< while the port is the launcher's choice
  std::string run_id;
  std::shared_ptr<const JoinDoor> door;  ///< while nodes may come by a token
};

/// Serves the job's store or connects to it: with `static` the node of rank 0 serves, with `c10d`
/// the one that can listen at the endpoint. Blocks until the store is there or
/// `options.join_timeout` has passed.
Result<NodeJob> open_job(const RunOptions& options, const Secret& secret);

/// Its place among the nodes (`node_membership.h`), in a job of several.
Result<std::unique_ptr<NodeMembership>> join_nodes(const RunOptions& options, const NodeJob& job,
                                                   const Secret& secret);

// A node of a job whose workers another program starts, such as stock torchrun's agent. It has the
// membership of `muster run`; what happens to the workers is that program's affair.

struct RendezvousNodeOptions {
  /// The kind of meeting: assigned_ranks, etcd or kubernetes.
  RendezvousKind rendezvous = RendezvousKind::assigned_ranks;
  /// host[:port]: the first node that can listen there serves the job. With etcd one or more
  /// members of a cluster, separated by commas; with kubernetes as `muster run` has it. Empty: this
  /// host, or this pod's cluster.
  std::string endpoint;
  std::string run_id;
  int min_nodes = 1;
  int max_nodes = 1;
  std::optional<std::string> local_addr;  ///< of this node for others; absent: found
  Duration join_timeout = std::chrono::seconds(600);
  Duration last_call = std::chrono::seconds(30);
  Duration repair_timeout{0};
  std::optional<Duration> ttl;  ///< as RunOptions::node_ttl
};

/// For one thread, except that its membership has a thread of its own.
class RendezvousNode {
 public:
  /// Finds the job and joins it. Blocks up to `join_timeout` for the place where nodes meet; does
  /// not wait for other nodes. The errors are those of `open_job` and `join_nodes`.
  static Result<std::unique_ptr<RendezvousNode>> open(const RendezvousNodeOptions& options);

  /// Readable when `take` has notices.
  int descriptor() const { return nodes_->descriptor(); }
  std::vector<NodeNotice> take() { return nodes_->take(); }

  /// This node's part in `epoch`; `running`: its launcher has come to it. See NodeReport.
  void report(membership::NodePhase phase, std::int64_t epoch, const std::string& reason);
  /// Ends the job on all nodes. Their notice is a JobEnded with exit code 0.
  void close(const std::string& reason);

  /// A store that the nodes of `plan` share. Connects to the node that serves it, which takes up to
  /// `timeout` where that does not answer.
  Result<std::shared_ptr<store::Store>> store_of(const EpochPlan& plan, Duration timeout) const;
  /// Chooses MASTER_PORT for the next epoch, if rank 0 is here then. Those of this epoch and the
  /// next stay reserved.
  Status reserve_next_port();
  /// Whether the other nodes of `plan` (null: of none) need this process.
  bool serves(const EpochPlan* plan) const;
  /// "host, process 77".
  const std::string& name() const { return job_.launcher; }

 private:
  RendezvousNode(bool in_service, Secret secret, NodeJob job, std::unique_ptr<NodeMembership> nodes)
      : in_service_(in_service),
        secret_(std::move(secret)),
        job_(std::move(job)),
        nodes_(std::move(nodes)) {}

  const bool in_service_;  // no node serves the job; each serves a store for its epochs
  const Secret secret_;
  NodeJob job_;
  std::shared_ptr<const ReservedPort> reserved_;  // of the epoch that runs; job_'s: of the next
  std::unique_ptr<NodeMembership> nodes_;         // goes before the store that it rests on
};

}  // namespace muster::launch
