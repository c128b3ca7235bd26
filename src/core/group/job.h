// SPDX-License-Identifier: BSD-3-Clause
/// State shared by all groups of one job in this process (store, fabric), and the creation of
/// groups.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/group/creation/creation_deadlock.h"
#include "core/rendezvous/rendezvous.h"
#include "core/trace/long_waits.h"
#include "core/trace/peer_traces.h"
#include "core/trace/recorder.h"
#include "core/trace/responder.h"
#include "core/transport/fabric.h"
#include "muster/backend_name.h"
#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/process_group.h"

namespace muster {
struct ProcessGroupOptions;  // backend_registry.h
}

namespace muster::group {

/// The threads of a later member use earlier ones, so they end first: the order counts.
struct Job {
  int rank = 0;
  int world_size = 1;
  std::string name;  ///< equal on all ranks
  std::shared_ptr<store::Store> store;
  std::shared_ptr<transport::Fabric> fabric;
  /// Fabric rank of each rank of the default group: 0, 1, 2, ... until the group is shrunk.
  std::vector<int> fabric_ranks;
  std::string era;  ///< distinguishes groups before and after a shrink
  std::shared_ptr<CreationDeadlockDetector> creation_deadlocks;
  std::shared_ptr<trace::Recorder> recorder;       ///< records this rank's calls; null: disabled
  std::shared_ptr<trace::PeerTraces> peer_traces;  ///< null without a recorder
  /// Answers requests over the store; null if there can be none.
  std::shared_ptr<trace::TraceResponder> responder;
  std::shared_ptr<trace::LongWaits> long_waits;  ///< null if the log does not show them
};

/// Connects to the other ranks through the store by the deadline. `timeout` is the default group's.
/// Throws an error that names the ranks that did not come, or whose backend or interfaces differ.
std::shared_ptr<Job> open_job(store::Rendezvous found, const BackendConfig& config,
                              Duration timeout, TimePoint deadline,
                              std::optional<Duration> heartbeat_timeout = {});

/// Parameters of a group's creation.
struct CreationOptions {
  /// Must be equal on all members; members with different terms do not meet.
  std::string terms = {};
  std::function<Status()> give_up = {};  ///< polled during the wait; its failure ends the creation
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< for backends that accept them
  std::optional<TimePoint> deadline = {};  ///< default: the group's timeout from now
  /// The first member's proposal, received by all members when they compared calls. Used by the
  /// first native backend, which then waits for no other member.
  collective::GroupProposal proposal = {};
  std::optional<at::Device> device_id = {};  ///< of this rank's tensors, for backends that connect
  bool grows = false;     ///< out of a group whose members are the first of this one
  Group grown_from = {};  ///< that group; null on ranks that join
};

/// The proposal of this rank. Must be cancelled if the members' calls differ.
collective::GroupProposal propose_group(const Job& job, const std::vector<int>& ranks,
                                        const BackendConfig& config);
/// The one that the members commit, by those of all of them; empty if they agree in another way.
collective::GroupProposal settle_proposals(const Job& job, const std::vector<int>& ranks,
                                           std::span<const collective::GroupProposal> proposals);

/// Creates a group; every member calls it. `ranks` are in group order. Blocks until all members
/// have called, up to the deadline of `creation`. `timeout` is for the group's calls. A process
/// that is not in `ranks` immediately gets a non-member's group.
Group make_group(const std::shared_ptr<Job>& job, std::string name, std::vector<int> ranks,
                 BackendConfig config, Duration timeout, CreationOptions creation = {});

/// Creates the default group of a job. On failure the job ends: the other ranks are told that this
/// rank has failed, and why.
Group make_default_group(const std::shared_ptr<Job>& job, const std::string& name,
                         BackendConfig config, Duration timeout, const CreationOptions& creation);

/// The name of a group of these ranks of the default group: "[0, 2]", or "[0, 2] of default shrunk"
/// after a shrink.
std::string name_of(const Job& job, const std::vector<int>& ranks);

/// Every member of `parent` calls it with the same disjoint parts (ranks of `parent`). Returns the
/// group of part number `own`; null if that is -1. Uses only the options and the deadline of
/// `creation`.
Group split_group(const std::shared_ptr<Job>& job, const ProcessGroup& parent,
                  const std::vector<std::vector<int>>& parts, int own, std::string name,
                  BackendConfig config, Duration timeout, const CreationOptions& creation);

struct ShrunkGroup {
  Group group;
  /// The job from now on; a new one if the default group was shrunk.
  std::shared_ptr<Job> job;
};
/// Every survivor calls it. `exclude` are ranks of `old`. `timeout` is for the creation as a whole
/// and for the new group's calls.
ShrunkGroup shrink_group(const std::shared_ptr<Job>& job, const ProcessGroup& old,
                         const std::vector<int>& exclude, bool is_default_group, Duration timeout,
                         std::shared_ptr<ProcessGroupOptions> pg_options);

/// Host number of a rank of the default group.
int host_of(const Job& job, int rank);

}  // namespace muster::group
