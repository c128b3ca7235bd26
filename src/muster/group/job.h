/// What all groups of one job share in this process: store, fabric, and how groups are made on
/// them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/communicator.h"
#include "muster/group/backend_name.h"
#include "muster/group/creation_order.h"
#include "muster/group/process_group.h"
#include "muster/store/rendezvous.h"
#include "muster/store/store.h"
#include "muster/trace/long_waits.h"
#include "muster/trace/peer_traces.h"
#include "muster/trace/recorder.h"
#include "muster/trace/responder.h"
#include "muster/transport/fabric.h"

namespace muster {
struct ProcessGroupOptions;  // pg_options.h
}

namespace muster::group {

struct Job {
  int rank = 0;
  int world_size = 1;
  std::string name;  ///< the same on all ranks
  std::shared_ptr<store::Store> store;
  std::shared_ptr<transport::Fabric> fabric;
  /// First number (in the fabric) of each rank of the default group: other ones than 0, 1, 2, ...
  /// after it was shrunk.
  std::vector<int> fabric_ranks;
  std::string era;  ///< tells groups of before and after a shrinking apart
  std::shared_ptr<CreationOrder> order;
  std::shared_ptr<trace::Recorder> recorder;       ///< of this rank's calls; null: none is kept
  std::shared_ptr<trace::PeerTraces> peer_traces;  ///< null without a recorder
  std::shared_ptr<trace::Responder>
      responder;  ///< to those who ask over the store; null where nobody can
  std::shared_ptr<trace::LongWaits> long_waits;  ///< null where the log does not show them
};

/// Meets the other ranks over the store, up to the deadline; `timeout` is the default group's.
/// Throws naming the ranks that did not come, or whose backend or interfaces differ.
std::shared_ptr<Job> open_job(store::Rendezvous found, const BackendConfig& config,
                              Duration timeout, TimePoint deadline);

/// How the members of a group that is being made meet.
struct Meeting {
  std::string terms = {};  ///< what must be equal on all: members with other terms do not meet
  std::function<Status()> give_up = {};  ///< asked while it waits; its failure ends the making
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< for backends that take some
  std::optional<TimePoint> deadline = {};  ///< absent: the group's timeout from now on
  /// The first member's, which came to all where they compared their calls: for the first native
  /// backend, which then waits for nobody.
  collective::GroupProposal proposal = {};
};

/// What this rank, as the first of `ranks`, proposes to them; else nothing. It is cancelled where
/// they turn out to make something else.
collective::GroupProposal propose_group(const Job& job, const std::vector<int>& ranks,
                                        const BackendConfig& config);

/// Every member calls it; `ranks` in group order. Blocks until all members have, up to the
/// meeting's deadline; `timeout` is the group's own, for its calls. A process that is not in
/// `ranks` gets a non-member's group at once.
Group make_group(const std::shared_ptr<Job>& job, std::string name, std::vector<int> ranks,
                 BackendConfig config, Duration timeout, Meeting meeting = {});

/// The default group of a job. Where it cannot be made the job ends: the others are told that this
/// rank gives up, and why.
Group make_default_group(const std::shared_ptr<Job>& job, const std::string& name,
                         BackendConfig config, Duration timeout, const Meeting& meeting);

/// What a group of these ranks of the default group is called: "[0, 2]", and after a shrinking "[0,
/// 2] of default shrunk".
std::string name_of(const Job& job, const std::vector<int>& ranks);

/// Every member of `parent` calls it with the same parts (positions in it, disjoint). The group of
/// part number `own`; null where that is -1. Of the meeting: its options and deadline.
Group split_group(const std::shared_ptr<Job>& job, const ProcessGroup& parent,
                  const std::vector<std::vector<int>>& parts, int own, std::string name,
                  BackendConfig config, Duration timeout, const Meeting& meeting);

struct ShrunkGroup {
  Group group;
  std::shared_ptr<Job>
      job;  ///< as the ranks see it from now on, where the default group was shrunk; else as before
};
/// Every survivor calls it; `exclude`: positions in `old`. `timeout`: of making it, as a whole, and
/// of its calls.
ShrunkGroup shrink_group(const std::shared_ptr<Job>& job, const ProcessGroup& old,
                         const std::vector<int>& exclude, bool of_world, Duration timeout,
                         std::shared_ptr<ProcessGroupOptions> pg_options);

/// Number of the host of a rank of the default group.
int host_of(const Job& job, int rank);

}  // namespace muster::group
