/// This node's membership in a job of several nodes: it holds a lease on its place, follows the
/// epochs, and commits the next one when it is this node's turn (`membership/next_epoch.h`).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/launch/agent_machine.h"
#include "muster/launch/rank_assignment.h"
#include "muster/membership/job_view.h"
#include "muster/membership/next_epoch.h"

namespace muster::launch {

/// A failure of a worker, as all nodes report it at the end.
struct FailureNote {
  std::int64_t epoch = 0;
  std::int64_t order = 0;  ///< numbers the failures of its node
  std::string text;        ///< "node 1 (host-b): rank 3 (local rank 1, ...) ended with exit code 3"
  friend bool operator==(const FailureNote&, const FailureNote&) = default;
};

/// What this node publishes besides its phase.
struct NodeDetails {
  NodeFacts facts;
  std::string launcher;            ///< "host, process 77"
  std::string program_addr;        ///< MASTER_ADDR, if rank 0 is here
  std::uint16_t program_port = 0;  ///< MASTER_PORT
  /// The workers' store, if rank 0 is here; empty: one store serves all epochs.
  std::string store_addr{};
  std::uint16_t store_port = 0;
  std::vector<FailureNote> failures{};  ///< the last few
};
std::string encode(const NodeDetails& details);
Result<NodeDetails> decode_node_details(const std::string& record);

/// An epoch from the view of one node's workers.
struct EpochPlan {
  membership::Epoch epoch;
  std::vector<NodeDetails> nodes;  ///< in the order of their slots
  int node = -1;                   ///< this node's index in `nodes`, GROUP_RANK; -1: it has no seat
  int slot = -1;                   ///< stays the same as long as it has a seat
};

struct NodeMembershipOptions {
  std::string name;      ///< name of the lease
  int wanted_slot = -1;  ///< -1: any
  Duration ttl = std::chrono::milliseconds(2500);
  membership::EpochOptions epochs;
  std::string place;  ///< of the membership service, for messages: "the job's store at host:29400"
  std::string job;    ///< its name, for messages
};

/// News for the agent.
struct NodeNews {
  std::optional<AgentEvent> event;
  std::shared_ptr<const EpochPlan> plan{};  ///< with a NewEpoch
  std::vector<FailureNote> failures{};      ///< of other nodes
  /// Number of the epoch of whose nodes all have now said something of it; 0: no news of that.
  std::int64_t complete = 0;
  bool service_lost = false;  ///< with a JobEnded: the membership service does not answer
};

class NodeMembership {
 public:
  /// Acquires the place. Code::refused names the launcher that already holds it.
  static Result<std::unique_ptr<NodeMembership>> join(
      std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
      NodeDetails details);
  /// Releases the place.
  ~NodeMembership();

  /// A descriptor that is readable when `take` has news.
  int descriptor() const { return event_.get(); }
  std::vector<NodeNews> take();

  /// Publishes to the other nodes. Best effort; blocks at most for the lifetime of an unrenewed
  /// lease. `killed`: see NodeReport.
  void report(membership::NodePhase phase, std::int64_t epoch, int exit_code,
              const std::string& reason, bool killed = false);
  void set_program_port(std::uint16_t port);
  void add_failure(const FailureNote& note);

 private:
  NodeMembership(std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
                 NodeDetails details);
  Status take_place();
  Status describe_holder(const Status& refused);
  void publish();
  void run();
  bool follow(const membership::Update& update);
  void follow_epoch();
  void follow_arrivals();
  void decide();
  bool keep_place();
  void give(NodeNews news);

  const NodeMembershipOptions options_;
  const std::unique_ptr<membership::Membership> membership_;
  Descriptor event_;
  std::mutex mutex_;  // guards what the agent's thread and this one share
  std::unique_ptr<membership::Hold> hold_;
  membership::NodeReport report_;
  NodeDetails details_;
  std::vector<NodeNews> news_;
  // Used only by the thread.
  std::unique_ptr<membership::Watch> watch_;
  membership::JobView view_;
  std::int64_t followed_ = 0;  // the last epoch reported to the agent
  std::int64_t complete_ = 0;  // the last one that was reported complete
  std::map<std::string, std::int64_t> failures_seen_;
  TimePoint ask_again_ = TimePoint::max();
  bool over_ = false;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace muster::launch
