// SPDX-License-Identifier: BSD-3-Clause
/// This node's membership in a job of several nodes: it holds a lease on its place, follows the
/// epochs, and commits the next one when it is this node's turn (`jobs/membership/next_epoch.h`).
///
/// Two threads divide the work, so that nothing that matters waits for the service. One follows
/// the watch, decides, and notices the end of the lease; it never makes a request. The other makes
/// all requests: it takes the place, and tells reports and epochs until the service has confirmed
/// them. The launcher's own thread only leaves work for them and takes their notices.
///
/// To lose the lease is not to die. The workers go on, and this node asks for its place again; if
/// no epoch has begun without it, it has its seat back and nothing has happened. Until then it
/// commits nothing. Its workers end by an epoch that leaves it out, or after `out_limit` of
/// silence.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/interruption.h"
#include "core/base/time/clock.h"
#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/node/epoch_plan.h"
#include "jobs/launch/node/kept_place.h"
#include "jobs/launch/node/node_details.h"
#include "jobs/membership/job_view.h"
#include "jobs/membership/next_epoch.h"

namespace muster::launch {

struct NodeMembershipOptions {
  /// Name of the lease. Unless a slot is wanted each further hold has a random end: the service may
  /// know this process's own earlier hold for as long as that lives.
  std::string name;
  int wanted_slot = -1;                            ///< -1: any
  Duration ttl = std::chrono::milliseconds(2500);  // limit: a default that users set
  membership::EpochOptions epochs;
  /// How long the workers go on without a word of the service.
  Duration out_limit = std::chrono::seconds(60);  // limit: of a service that is away
  std::string place;  ///< of the membership service, for messages: "the job's store at host:29400"
  std::string job;    ///< its name, for messages
};

/// The job stands still for the sake of its state.
struct StateWait {
  std::int64_t epoch = 0;    ///< that has lost the nodes
  std::vector<int> slots{};  ///< of the nodes that are waited for; -1: of one without a seat
  Duration at_most{};        ///< from now on
  std::string text{};        ///< for people
};

/// News for the launcher.
struct NodeNotice {
  std::optional<LauncherEvent> event;
  /// With a NewEpoch, unless that only ends the workers.
  std::shared_ptr<const EpochPlan> plan{};
  std::vector<FailureNote> failures{};  ///< of other nodes
  /// Number of the epoch of whose nodes all have now said something of it; 0: no notice of that.
  std::int64_t complete = 0;
  bool service_lost = false;  ///< with a JobEnded: the membership service does not answer
  /// On every node with a place, once for each set of nodes.
  std::optional<StateWait> waits_for_state{};
};

/// This node's knowledge of the job's state.
struct StateNote {
  std::int64_t epoch = 0;      ///< the newest one in which a worker here got it; 0: none has it
  bool divided = false;        ///< each rank has a part
  std::int64_t committed = 0;  ///< the newest commit that workers here know; 0: none
  std::int64_t lost_in = 0;    ///< the epoch in which they heard that no rank has it; 0: none
  std::int64_t kept_in = 0;    ///< the epoch of a commit of earlier workers, for the next; 0: none
  std::int64_t running = 0;    ///< the epoch of the workers
  std::int64_t gone_in = 0;    ///< the epoch of a state that ended here with workers, or in part
};

class NodeMembership {
 public:
  /// Acquires the place. Code::refused names the launcher that already holds it.
  static Result<std::unique_ptr<NodeMembership>> join(
      std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
      NodeDetails details);
  /// Releases the place.
  ~NodeMembership();

  /// A descriptor that is readable when `take` has notices.
  int descriptor() const { return event_.get(); }
  std::vector<NodeNotice> take();

  /// Publishes to the other nodes, in the order of the calls, until the service has confirmed it or
  /// the place is lost. Returns at once. `killed`, `trained_in`: see NodeReport.
  void report(membership::NodePhase phase, std::int64_t epoch, int exit_code,
              const std::string& reason, bool killed = false, std::int64_t trained_in = 0);
  /// The group of the epoch has failed for workers here, which live: publishes the slots of the
  /// nodes that they blame, with those told of the same epoch before.
  void report_trouble(std::int64_t epoch, const std::vector<int>& slots, const std::string& text,
                      std::int64_t committed);
  /// The others are told what they need of it, so it may be called often.
  void note_state(const StateNote& note);
  /// A worker here has said that it ends in this epoch, or was told to leave.
  void report_ending(std::int64_t epoch);
  void set_program_port(std::uint16_t port);
  void add_failure(const FailureNote& note);
  /// Whether the service has confirmed all of that, or no node needs it any more. When it becomes
  /// true there are notices, if only empty ones.
  bool all_confirmed() const;
  /// The destructor waits for it for at most two seconds, unless it is given up here.
  void forget_unconfirmed();

 private:
  struct ProposedEpoch {
    membership::Epoch epoch;
    std::int64_t on_top_of = 0;  // revision of the present one
    friend bool operator==(const ProposedEpoch&, const ProposedEpoch&) = default;
  };
  using Lock = std::unique_lock<std::mutex>;

  NodeMembership(std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
                 NodeDetails details);
  std::string next_name() const;
  Status start();
  void publish();
  void drop_unconfirmed();
  void give(NodeNotice notice);
  void give_under_lock(NodeNotice notice);
  void end_of_job(JobEnded end, bool service_lost);
  std::string service_lost_text(const std::string& why) const;

  // By the thread that makes requests. Each gives the lock up during a request.
  void tell_all();
  Status take_place(Lock& lock);
  Status describe_holder(const Status& refused, const std::string& name, bool& own) const;
  Status tell_report(Lock& lock);
  Status tell_epoch(Lock& lock);
  Status take_place_again(Lock& lock);
  void note_trouble(Lock& lock, const std::string& what, const Status& status);

  // By the thread that follows the watch.
  void follow_all();
  bool follow(const membership::Update& update, bool stood_still);
  void note_others(const membership::Update& update);
  bool refuses_itself();
  void follow_epoch();
  void follow_arrivals();
  void decide(bool stood_still);
  void note_wait(const membership::Decision& decision);
  void propose(std::optional<ProposedEpoch> epoch);
  void keep_place();
  void give_workers_up();
  void await_seat();
  bool has_workers() const;
  std::string place() const;
  TimePoint expires() const;

  const NodeMembershipOptions options_;
  const std::unique_ptr<membership::Membership> membership_;
  const std::shared_ptr<Interruption> closing_ = std::make_shared<Interruption>();
  Descriptor event_;
  mutable std::mutex mutex_;  // guards all down to `notices_`; never held during a request
  // `work_` wakes the thread that makes requests; `confirmed_` wakes the destructor.
  std::condition_variable work_, confirmed_;
  std::string name_;  // of the hold, or of the last one
  KeptPlace place_;
  bool seated_ = false;      // in the last epoch followed, or until it gave up
  bool is_first_ = false;    // of its nodes, while it is seated
  std::int64_t joined_ = 0;  // the epoch in which it got the seat that it had last
  membership::NodeReport report_;
  NodeDetails details_;
  std::int64_t gone_in_ = 0;               // as the last `note_state` said
  std::deque<std::string> unconfirmed_;    // reports that the service has not confirmed
  std::optional<ProposedEpoch> proposed_;  // that it has not answered
  std::int64_t answered_ = -1;             // on top of this revision an epoch has been committed
  TimePoint answered_at_{};
  std::string trouble_;  // the last that was logged
  std::vector<NodeNotice> notices_;
  std::atomic<bool> over_ = false;  // the job has ended for this node
  std::atomic<bool> stop_ = false;
  // Used only by the thread that follows the watch.
  std::unique_ptr<membership::Watch> watch_;
  membership::JobView view_;
  std::int64_t followed_ = 0;  // the last epoch reported to the launcher
  membership::Epoch epoch_;    // that one
  std::int64_t complete_ = 0;  // the last one that was reported complete
  std::map<std::string, std::int64_t> failures_seen_;
  std::string compared_;  // the name under which this node was compared with those before it
  TimePoint ask_again_ = TimePoint::max();
  std::vector<int> awaited_;  // as the last decision says
  OwnPauses pauses_;          // that have put a decision off
  std::thread following_, telling_;
};

}  // namespace muster::launch
