// SPDX-License-Identifier: BSD-3-Clause
/// A job as one node knows it from its watch: nodes and what they report, seats, losses. Values
/// only; no I/O, no clock.
///
/// Every update costs as much as it has changes (times the logarithm of the number of nodes); only
/// a new epoch, which names all its members, costs as much as it has members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jobs/membership/failure_rule.h"
#include "jobs/membership/membership.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::membership {

enum class NodePhase : std::uint8_t {
  waiting = 0,    ///< wants to be in an epoch
  running = 1,    ///< its workers of `epoch` run
  succeeded = 2,  ///< its workers of `epoch` have all ended well
  failed = 3,     ///< a worker of `epoch` has failed: all shall start again, or the job ends
  stopped = 4,    ///< it has failed in a way that no restart mends: the job shall end
  leaving = 5,    ///< it goes in good order, and shall have no seat any more
  finished = 6    ///< its workers of `epoch` have all ended well, and it starts none again
};

struct NodeReport {
  NodePhase phase = NodePhase::waiting;
  std::int64_t epoch = 0;         ///< that the phase belongs to; what is said of another is void
  std::int32_t wanted_slot = -1;  ///< the only one that it may have; -1: any
  std::int32_t exit_code = 0;     ///< failed, stopped: what the job would end with
  std::string host{};
  std::string reason{};   ///< failed, stopped: a sentence
  std::string details{};  ///< the launcher's own words, opaque here
  bool killed = false;    ///< failed: its worker was killed, so no other rank's end is behind that
  /// The epoch whose ranks have all come to the end of training: what is left is to save the
  /// result. 0: none. Said anew in later epochs.
  std::int64_t trained_in = 0;
  /// The numbers of nodes that this one was started with (--nnodes), which are the whole job's; 0:
  /// not said.
  std::int32_t least_nodes = 0;
  std::int32_t most_nodes = 0;
  /// Equal where the program that this node starts and its arguments are. Empty: not said.
  std::string program_id{};
  /// Names the workers that this node has and the launcher that has them. A node that lost its hold
  /// and kept its workers takes its seat again under another name by it. Empty: it never does.
  std::string incarnation{};
  /// The epoch whose group has failed on this node while its workers live; 0: none.
  std::int64_t troubled_in = 0;
  /// Slots of the nodes whose ranks its workers could not reach then, its own for one of its own.
  /// Empty: they do not know.
  std::vector<std::int32_t> blamed{};
  std::string trouble{};       ///< what one of its workers says of that
  std::int64_t committed = 0;  ///< the newest commit that its workers knew then; 0: none
  /// The epoch in which one of its workers has said that it ends, or was told to leave, and has not
  /// ended; 0: none.
  std::int64_t ending_in = 0;
  /// An epoch in which a worker that it still has got the job's state, or made the job's first
  /// commit; 0: none of its workers has that. Said once for each seat that it gets, and when it has
  /// the state no more; the first node says it in every epoch.
  std::int64_t state_in = 0;
  /// Each rank has a part of the state. Once a commit was made in an epoch, the next node has a
  /// copy.
  bool state_divided = false;
  std::int64_t lost_in = 0;  ///< the epoch whose ranks all had none of the job's commits; 0: none
  /// The epoch of a commit that its launcher has of workers that have ended since. Its next workers
  /// go on from it if no other rank has a newer one. 0: none, or they have the state.
  std::int64_t kept_in = 0;
  /// The epoch whose workers had the state, and have it no more, as they ended with it; of a
  /// divided state also if that is true of one of them: the others have their parts, and `state_in`
  /// says so. 0: none, or its workers have got the state since, or have not got it yet.
  std::int64_t none_in = 0;
  friend bool operator==(const NodeReport&, const NodeReport&) = default;
};

/// Adds the slots to those blamed in the same epoch, whose first text stays.
void add_trouble(NodeReport& report, std::int64_t epoch, const std::vector<int>& slots,
                 const std::string& text, std::int64_t committed);
std::string encode(const NodeReport& report);
Result<NodeReport> decode_report(std::string_view record);

class JobView {
 public:
  static constexpr std::size_t kTroublesKept = 16;  // limit: memory for a host
  struct Node {
    std::int64_t since = 0;  ///< revision at which its hold began: the order of arrival
    NodeReport report;
    int slot = -1;  ///< in the present epoch; -1: it waits
    /// Of one that was silent: the newest epoch whose commits its workers may have, as others know.
    std::int64_t may_keep = 0;
    /// The epoch of the commit that it would bring into the next one, if it has no seat: of the
    /// commit in its launcher, or in workers that it has not ended yet; 0: none.
    std::int64_t offered_in() const;
  };
  /// A member of the present epoch. It outlives its node's hold: until the next epoch the same
  /// incarnation may take it again, and then it was never lost.
  struct Seat {
    std::string name{};  ///< of the hold that has it now, or had it last
    std::string value{};
    std::string host{};
    std::string incarnation{};
    bool present = true;      ///< its name is held, and it is not leaving
    bool succeeded = false;   ///< stays true even if the node then goes
    bool arrived = false;     ///< its node has said something of this epoch
    std::int64_t joined = 0;  ///< the epoch in which it got its seat
    bool blamed = false;      ///< its loss counts against its host
    bool silent = false;      ///< lost, but its node may live and come back
    TimePoint lost_at{};
    std::string leave_reason{};  ///< of a node that leaves in good order: why, a sentence
    bool has_state = false;      ///< its workers have the job's state in memory; or had, when lost
    bool heard = false;          ///< this view knows from its node whether it has the state
    std::int64_t had_state_in = 0;  ///< NodeReport::state_in, the newest one since it has the seat
    std::int64_t kept_in = 0;       ///< as NodeReport::kept_in
    std::int64_t told_in = 0;       ///< NodeReport::state_in, the last one
    std::int64_t none_in = 0;       ///< as NodeReport::none_in
    bool told_none = false;         ///< that, as it had the state and has it no more, in this epoch
    /// The newest epoch with a commit of a divided state since it has the seat: that left a part
    /// with it, also if it has not told so yet. 0: none, or it has told that it has none any more.
    std::int64_t part_in = 0;
    /// Whether a part that was made in `epoch` is gone, as its node says.
    bool is_part_gone(std::int64_t epoch) const { return none_in > 0 && none_in >= epoch; }
  };
  struct Failure {
    std::string name;
    NodePhase phase = NodePhase::failed;
    int exit_code = 1;
    std::string reason;
    TimePoint since{};  ///< when this node heard of it
    bool killed = false;
  };

  /// A node that fell silent and has no seat. It may have a commit: in its workers, which have not
  /// heard yet that it lost its seat, or in its launcher.
  struct SilentKeeper {
    std::string incarnation, host;
    std::int64_t kept_in = 0;  ///< the newest epoch that the commit may be of
    TimePoint since{};
  };

  /// A member's words on the failure of the present epoch's group.
  struct Trouble {
    std::vector<int> blamed;
    std::string text;
    std::int64_t committed = 0;
  };

  /// `update` must be the next one of a watch. Returns how many nodes it looked at. Values that
  /// this version cannot read are taken for absent nodes, and named by `unreadable()`.
  std::size_t apply(const Update& update, TimePoint now);

  /// The workers of the viewing node have the job's state since `epoch`, of which it may not have
  /// told the others.
  void hear_own_state(std::int64_t epoch, bool divided);

  /// Up to which the view knows everything.
  std::int64_t revision() const { return revision_; }
  const Epoch& epoch() const { return epoch_; }
  std::int64_t epoch_revision() const { return epoch_revision_; }
  const std::unordered_map<std::string, Node>& nodes() const { return nodes_; }
  const std::map<int, Seat>& seats() const { return seats_; }
  /// Nodes without a seat that want one, in the order in which they came.
  const std::set<std::pair<std::int64_t, std::string>>& waiting() const { return waiting_; }
  /// Seats whose node is gone or leaving and has not succeeded.
  const std::set<int>& lost() const { return lost_; }
  /// Seats whose node is gone or leaving, succeeded or not.
  const std::set<int>& vacant() const { return vacant_; }
  std::size_t succeeded() const { return succeeded_; }
  /// Seats whose node has said something of the present epoch.
  std::size_t arrived() const { return arrived_; }
  /// The epoch whose ranks have all come to the end of training; 0: none.
  std::int64_t trained_in() const { return trained_in_; }
  /// Failures that members have reported of the present epoch, and any node that has stopped; in
  /// the order of arrival.
  const std::vector<Failure>& failures() const { return failures_; }
  /// By slots. No process has ended: that is a failure, or a loss.
  const std::map<int, Trouble>& group_troubles() const { return group_troubles_; }
  /// When the first of them became known here.
  TimePoint troubled_since() const { return troubled_since_; }
  /// Whether a worker of a member has said that it ends in the present epoch.
  bool has_ending_worker() const { return has_ending_worker_; }
  /// The pairs of slots that were blamed in earlier epochs, the last ones.
  const std::vector<EarlierBlame>& blamed_before() const { return blamed_before_; }
  /// The newest commit that the reports of `group_troubles` name; 0: none.
  std::int64_t committed() const;
  /// As `Epoch::lost_in`, up to now.
  std::int64_t lost_in() const { return lost_in_; }
  /// Members that are there and have the job's state, or a part of it, in memory.
  std::size_t state_holders() const { return state_holders_; }
  /// So many of the members that had it may be lost, and those that are there have all of it.
  std::size_t losses_of_state_borne() const {
    if (state_holders_ == 0) return 0;
    return state_divided_ ? (may_lose_a_part() ? 1 : 0) : lost_.size();
  }
  /// Whether every member could go, and the others had all of the state: nobody has gone since the
  /// last commit, and no part with its worker. A group that did not form has made none, and lost
  /// none.
  bool may_lose_a_part() const {
    if (!state_divided_) return true;
    return (state_made_ || epoch_.parts_gone == 0) && !has_lost_a_part();
  }
  bool state_divided() const { return state_divided_; }
  /// As `Epoch::state_in`, up to now.
  std::int64_t state_in() const { return state_in_; }
  /// When an epoch was decided that left this incarnation out because of a failed group.
  std::optional<TimePoint> left_out_at(const NodeReport& report) const;
  /// Adds to the epoch that is to follow, whose members are set, what its readers are to know of
  /// commits, of failed groups, and of hosts in trouble since `troubles_since`: what the present
  /// epoch says, and what has become of it.
  void record_past(Epoch& next, TimePoint now, TimePoint troubles_since) const;
  /// In the order in which they fell silent, the last ones.
  const std::deque<SilentKeeper>& silent_keepers() const { return silent_keepers_; }
  /// Slots below the highest seat that no node sits in.
  const std::set<int>& gaps() const { return gaps_; }
  /// Since when there is a lost seat; max: there is none.
  TimePoint lost_since() const { return lost_since_; }
  /// When the first update came.
  TimePoint began() const { return began_; }
  /// When the last node came that waits; max: no node does.
  TimePoint last_arrival() const { return last_arrival_; }
  /// Seats whose node is there.
  std::size_t seated() const { return present_.size(); }
  /// When nodes of this host were lost or failed, the last ones.
  const std::deque<TimePoint>* troubles_of(const std::string& host) const;
  /// Whether this incarnation sits in the present epoch under another name, whose hold has not
  /// ended yet.
  bool is_seated(const NodeReport& report) const;
  const std::string& unreadable() const { return unreadable_; }

  /// The node that commits the next epoch: the present member with the lowest slot, else the node
  /// that came first. Empty: no node is there. The same on every node that has seen the same
  /// updates.
  std::string proposer() const;

 private:
  void apply(const Change& change, TimePoint now);
  void adopt(const Epoch& epoch, bool was_watched);
  Seat next_seat(const Member& member, const std::unordered_map<std::string, Seat>& before);
  void lose_absent_members(TimePoint now);
  void record_failures(Epoch& next, TimePoint now) const;
  void record_state(Epoch& next) const;
  void record_keepers(Epoch& next, TimePoint now) const;
  void recall_past(const Epoch& epoch, TimePoint now);
  void recall_keepers(const Epoch& epoch, TimePoint now);
  void add(const std::string& name, Node node, TimePoint now);
  /// How a node's hold ended.
  enum class Absence : std::uint8_t { left, died, fell_silent };
  void remove(const std::string& name, Absence how, TimePoint now);
  void note_silent_keeper(SilentKeeper node);
  void note_silent_members();
  std::int64_t may_keep(const Seat& seat) const;
  /// The newest epoch whose commits it may have; 0: it was none.
  std::int64_t forget_silent_keeper(const std::string& incarnation);
  void judge(const std::string& name, Node& node, TimePoint now);
  void hear(Seat& seat, const NodeReport& report);
  void hear_of_state(Seat& seat, const NodeReport& report);
  void note_state_made(bool made, bool divided);
  void lose_old_parts();
  bool has_lost_a_part() const;
  bool has_part(const Seat& seat) const {
    return state_divided_ && seat.part_in > 0 && seat.part_in >= lost_in_;
  }
  void set_has_state(Seat& seat, bool has);
  void lose(int slot, Absence how, TimePoint now);
  void take_back(int slot, const std::string& name);
  Node* holder_of(const Seat& seat);
  void trouble(const std::string& host, TimePoint now);

  std::int64_t revision_ = 0;
  Epoch epoch_;
  std::int64_t epoch_revision_ = 0;
  std::unordered_map<std::string, Node> nodes_;
  std::map<int, Seat> seats_;
  std::unordered_map<std::string, int> seat_of_;  // by incarnation; of the present epoch
  // Nodes whose incarnation has a seat under an earlier name that is held still.
  std::unordered_map<std::string, std::string> returning_;
  struct EndedHold {
    Absence how = Absence::died;
    std::string leave_reason{};  // as Seat::leave_reason
  };
  // Incarnations whose hold has ended other than by silence, since the present epoch began: the
  // next one may name them still.
  std::unordered_map<std::string, EndedHold> ended_;
  std::deque<SilentKeeper> silent_keepers_;
  // Every seat is in one of `present_`, whose first proposes, and `vacant_`, for the whole epoch:
  // a node that comes back without its workers waits for the next. `lost_` became vacant before
  // they succeeded.
  std::set<int> present_;
  std::set<int> lost_, vacant_, gaps_;
  std::set<std::pair<std::int64_t, std::string>> waiting_;
  std::size_t succeeded_ = 0;
  std::size_t arrived_ = 0;
  std::size_t state_holders_ = 0;  // of `present_`
  std::int64_t commits_ = 0;       // as `Epoch::committed`, up to now
  std::int64_t lost_in_ = 0;       // the newest epoch of which that is known
  std::int64_t state_in_ = 0;      // as `Epoch::state_in`, up to now
  // What its members have said of the state in the present epoch: that each has a part, that they
  // have made a commit or got one.
  bool state_divided_ = false, state_made_ = false;
  std::int64_t trained_in_ = 0;
  std::vector<Failure> failures_;
  std::set<std::string> failed_names_;  // of `failures_`
  TimePoint lost_since_ = TimePoint::max();
  TimePoint began_ = TimePoint::max();
  TimePoint last_arrival_ = TimePoint::max();
  std::unordered_map<std::string, std::deque<TimePoint>> troubles_;
  std::string unreadable_;
  std::map<int, Trouble> group_troubles_;
  TimePoint troubled_since_ = TimePoint::max();
  bool has_ending_worker_ = false;
  // Both as the present epoch says, the oldest first.
  std::vector<EarlierBlame> blamed_before_;
  std::vector<std::pair<std::string, TimePoint>> left_out_;  // by incarnation
};

}  // namespace muster::membership
