// SPDX-License-Identifier: BSD-3-Clause
/// The members of a job: names that nodes hold, changes that they watch, and the epoch that they
/// commit.
///
/// `membership/` has the interface `Membership`, its kinds behind `factory.h`, and `next_epoch.h`,
/// which decides from what a watch tells who shall be in the next epoch. Nothing here agrees on
/// anything by itself: each kind rests on one place that puts changes in order (etcd, the store
/// that node 0's agent serves, a resource of Kubernetes). May include base/ and store/. Its tests:
/// `ctest -R membership`; `testing/membership_suite.h` runs over every kind.
///
/// The contract that every kind keeps:
/// * All changes of a job are in one order. A revision numbers them; revisions only grow. The epoch
///   has its place in that order too.
/// * A name is held by at most one `Hold`. It is free again when the hold is destroyed, at once
///   where the kind sees that the process has ended, and at the latest `ttl` after the last word
///   that reached the service. A holder that was declared gone cannot come back as the same hold.
/// * A watcher sees the last value of each name and may miss values between. It never misses that
///   a hold ended and another began: then `Change::since` differs.
/// * The number of the epoch is a fencing token: a commit with an older one, or on top of an older
///   one, is refused by an error that says both numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::membership {

/// One node of an epoch. A node keeps its slot from epoch to epoch; ranks are given in the order
/// of the slots, of which some may be empty.
struct Member {
  std::int32_t slot = 0;
  std::string name;         ///< that it holds
  std::string value;        ///< of its hold, when the epoch was decided
  std::int64_t joined = 0;  ///< the epoch in which it got its seat
  friend bool operator==(const Member&, const Member&) = default;
};

/// Two slots whose nodes could not reach each other in an earlier epoch (`failure_rule.h`).
struct RecordedBlame {
  std::int32_t one = -1, other = -1;  ///< `one` <= `other`; both -1: a failure without blame
  std::int64_t committed = 0;         ///< the newest commit that was known then; 0: none
  Duration ago{};                     ///< of the failure, when this epoch was decided
  friend bool operator==(const RecordedBlame&, const RecordedBlame&) = default;
};

/// A node that an epoch left out because it could not reach others.
struct RecordedAbsence {
  std::string incarnation;
  Duration ago{};  ///< of the decision to leave it out, when this epoch was decided
  friend bool operator==(const RecordedAbsence&, const RecordedAbsence&) = default;
};

/// A host of which a node was lost, or a worker failed.
struct RecordedTrouble {
  std::string host;
  Duration ago{};  ///< of the trouble, when this epoch was decided
  friend bool operator==(const RecordedTrouble&, const RecordedTrouble&) = default;
};

/// A node that fell silent and has no seat: it or its launcher may have a commit in memory.
struct RecordedKeeper {
  std::string incarnation, host;
  std::int64_t kept_in = 0;  ///< the newest epoch that the commit may be of
  Duration ago{};            ///< since when it has been silent, when this epoch was decided
  friend bool operator==(const RecordedKeeper&, const RecordedKeeper&) = default;
};

enum class JobState : std::uint8_t {
  running = 0,
  succeeded = 1,  ///< all workers of all members have ended well
  failed = 2      ///< `reason` and `exit_code` say why
};

struct Epoch {
  std::int64_t number = 0;  ///< from 1; 0: nothing has been committed
  JobState state = JobState::running;
  std::int32_t restarts = 0;      ///< how many failures of workers the job has used up
  std::int32_t exit_code = 0;     ///< of a job that has failed
  std::string reason;             ///< why there is a new epoch: a sentence for people
  std::vector<Member> members{};  ///< in ascending order of slots; empty once the job has ended
  std::string launch{};           ///< drawn with the first epoch; those after it have the same
  /// What the rules need of earlier failures, so that a node that came later decides as one that
  /// has seen them. Durations, as the clocks of two nodes differ.
  std::vector<RecordedBlame> blames{};
  std::vector<RecordedAbsence> left_out{};
  std::vector<RecordedTrouble> troubles{};
  /// The newest commit that a member had told of when this epoch was decided, since the job's state
  /// was lost last; 0: none. A node that came later knows by it that there is a state to lose.
  std::int64_t committed = 0;
  /// The last epoch whose ranks all had none of the job's commits; 0: none.
  std::int64_t lost_in = 0;
  /// The newest epoch in which a member had the job's state, or may have had: commits may have been
  /// made in it of which nobody else has heard. 0: none.
  std::int64_t state_in = 0;
  /// Each rank had a part of that state.
  bool state_divided = false;
  /// So many members that had a part of a divided state have gone since the last commit that is
  /// known of. Each part has one copy, so the first one takes nothing with it.
  std::int32_t parts_gone = 0;
  /// A node that comes later waits for them too.
  std::vector<RecordedKeeper> keepers{};
  friend bool operator==(const Epoch&, const Epoch&) = default;
};

/// How an epoch lies in the service. `decode` refuses what `encode` could not have written.
std::string encode(const Epoch& epoch);
Result<Epoch> decode_epoch(std::string_view record);

/// The new state of one name.
struct Change {
  std::string name;
  std::optional<std::string> value;  ///< absent: no process holds it any more
  std::int64_t since = 0;  ///< the revision at which this hold began; of a name that is gone, 0
  /// Of a name that is gone: its holder may live, and take it again. False where the kind knows
  /// that it let go or has ended.
  bool silent = false;
};

/// The changes that one call of a watcher returns. Empty after a timeout.
struct Update {
  std::int64_t revision = 0;  ///< up to which it knows everything
  /// True: `changes` are all names that are held now; those that it does not name are gone.
  bool snapshot = false;
  std::vector<Change> changes{};
  std::optional<Epoch> epoch{};     ///< the last one committed, if that is news
  std::int64_t epoch_revision = 0;  ///< of `epoch`: what `commit` expects
};

/// A name that this process holds. Renewed by the kind's own thread. Destroying it frees the name
/// (waits at most about a second for the service). Thread-safe.
class Hold {
 public:
  virtual ~Hold() = default;
  /// Another value for the name; watchers are told. Code::refused once the hold has been lost.
  virtual Status set(std::string_view value) = 0;
  /// Code::refused once the service has said that the hold is lost: for good. Code::timed_out while
  /// the service has been silent for the ttl: the name may be held still, or be another's. It is
  /// asked on, and the hold is ok again when it answers that it never let go. Never waits.
  virtual Status state() const = 0;
  /// When to look at `state` again: before that time only the service's own word loses the hold.
  /// Not after now while it is not ok.
  virtual TimePoint expires() const = 0;
  /// When the service answered about the hold again after a silence in which others may have lost
  /// theirs; max: it is silent still; zero: it never was, as far as this process can tell.
  virtual TimePoint silent_until() const { return {}; }
};

/// A position in the order of changes. `next` is for one thread, `close` for any.
class Watch {
 public:
  virtual ~Watch() = default;
  /// Blocks until there is something new; an empty Update after `timeout` (negative: no limit). The
  /// first call returns at once, with a snapshot and, where there is one, the epoch. Code::aborted
  /// after `close`; Code::network where the service is gone for good (kinds with several servers
  /// try the others first).
  virtual Result<Update> next(Duration timeout) = 0;
  /// Ends `next`, now and for ever.
  virtual void close() = 0;
};

/// One job, as one process sees it. Thread-safe. Every call takes at most the time that the kind
/// was made with and then is Code::timed_out.
class Membership {
 public:
  virtual ~Membership() = default;
  /// Takes `name` with `value`. Code::refused, saying what its holder says of itself, where
  /// somebody else holds it. `ttl`: how long the service waits for a sign of life before it lets
  /// go; kinds have a least one and round up.
  virtual Result<std::unique_ptr<Hold>> hold(std::string_view name, std::string_view value,
                                             Duration ttl) = 0;
  /// Watches all names that begin with `prefix` (empty: all), and the epoch.
  virtual Result<std::unique_ptr<Watch>> watch(std::string_view prefix) = 0;
  /// Makes `epoch` the job's epoch if the present one is still that of `expected_revision` (0:
  /// there is none yet) and has a lower number; returns the new revision. Otherwise Code::refused
  /// with both numbers: the watch tells what came instead. An error of another code leaves open
  /// whether it was committed.
  virtual Result<std::int64_t> commit(const Epoch& epoch, std::int64_t expected_revision) = 0;
  /// "agent", "etcd", "slurm", "kubernetes".
  virtual const char* kind() const = 0;
};

}  // namespace muster::membership
