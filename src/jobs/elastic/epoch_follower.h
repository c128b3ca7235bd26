// SPDX-License-Identifier: BSD-3-Clause
/// A worker's side of `--elastic=keep`: reads the launcher's notices, ends the default group of an
/// epoch that is over, and makes that of the next one.
///
/// elastic/ has this, `run`, the commits of a state (`state_commits.h`), and C++'s state
/// (`state.cc`). Tested with real processes by `tests/elastic`.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/interruption.h"
#include "jobs/elastic/commit_memory.h"
#include "jobs/launch/workers/worker_notices.h"
#include "muster/elastic.h"

namespace muster {
class World;
}

namespace muster::elastic {

/// Has the commits of a State.
class CommitKeeper {
 public:
  /// Called by the thread that reads notices: a copy of the last commit, if it lies in this
  /// process's own memory alone. None is made after it, or it would be lost with this process.
  virtual std::optional<CommitMemory> hand_over() = 0;

 protected:
  ~CommitKeeper() = default;
};

class EpochFollower {
 public:
  /// The follower of this process; the first call makes it and starts its thread. Neither is ever
  /// destroyed.
  static EpochFollower& of_process();

  /// Blocks until this process has a default group, of an epoch later than that of the group that
  /// it had before. False: it is to leave instead. Throws `failure`, why the group before ended, if
  /// no epoch comes within `options.repair_timeout`.
  bool join(const ElasticOptions& options, const std::exception_ptr& failure);
  /// Whether an exception is the end of an epoch: the group has failed, or the launcher has
  /// announced another epoch. A status of code ok stands for an exception that is no DistError:
  /// then the group and the launcher alone tell. If only the group has, the launcher hears whom the
  /// failure blames, so call it while the group exists.
  bool epoch_is_over(const Status& failure) const;
  /// An exception goes through `run`: the launcher hears that this process is about to end.
  void note_ending() const;
  /// Ends the default group without waiting for others.
  void drop_group();
  /// Ends the default group after `train` has returned. If all ranks end, in good order: a rank
  /// that dies now takes nothing with it, and the launcher repairs nothing any more. If other nodes
  /// go on, like `drop_group`.
  void end_group(RunOutcome outcome);

  /// Whether the launcher wants this process to leave after the next commit.
  bool leaving() const;
  /// Whether all ranks of the job have this one's launcher.
  bool is_only_node() const;
  std::int64_t epoch() const;
  /// Number of this process's node in the present epoch, GROUP_RANK.
  int node() const;
  /// Memory that the launcher has held for this process's place since another process had it; once.
  std::vector<Descriptor> take_memories();
  /// The launcher holds these memory files from now on, for the process that takes this one's place
  /// after its death. Does nothing without a launcher that keeps workers.
  void give_memories(std::span<const int> memories) const;
  /// The newest commit that the launcher of this process has heard of from earlier epochs; 0: none.
  std::int64_t committed_before() const;
  /// The newest epoch before the present one in which a node had the job's state; 0: none.
  std::int64_t state_before() const;
  /// This process has the job's state in memory in the present epoch, or its part of it, of so many
  /// commits. The launcher is told once, and again if `divided` changes.
  void note_state(std::int64_t commits, bool divided);
  /// The program has committed `number` times. The launcher is told at most ten times in a second.
  void note_commit(std::int64_t number);
  /// Called on every rank when of at least `commits` commits no rank has more than the first
  /// `kept`; if both are the same nobody knows whether there were more. The launcher is told.
  /// Throws DistError (Code::exhausted) where --on-lost-state is fail.
  void note_lost_state(std::int64_t commits, std::int64_t kept) const;
  /// The keeper gives its last commit if the job goes on without this node. Until `forget_keeper`,
  /// which waits for a copy that is being made.
  void set_keeper(CommitKeeper* keeper);
  void forget_keeper(const CommitKeeper* keeper);
  /// The launcher's notice that began the present epoch: ranks and addresses. Absent: those of the
  /// environment.
  std::optional<launch::WorkerNotice> entered() const;

 private:
  EpochFollower();
  void read();
  bool is_announced() const;
  void tell_trouble(const Status& failure) const;
  bool read_one();
  void hand_over() const;
  /// Waits for `ready` or the deadline; gives which it was. Throws if the thread is interrupted.
  bool wait(std::unique_lock<std::mutex>& lock, TimePoint deadline,
            const std::function<bool()>& ready);
  bool try_epoch(const ElasticOptions& options, std::int64_t epoch,
                 const std::optional<launch::WorkerNotice>& notice);

  // Set by the constructor.
  int channel_ = -1;  // of the launcher that has started this process; -1: none that keeps workers
  bool is_spare_ = false;
  int nodes_ = 1, node_ = 0;    // of the environment
  std::int64_t committed_ = 0;  // MUSTER_COMMITTED
  std::int64_t state_in_ = 0;   // MUSTER_STATE_EPOCH
  bool fails_without_state_ = false;
  TimePoint committed_at_{};  // when `note_commit` told the launcher last; by the thread of `run`
  launch::HeldState state_told_{};  // as `note_state` told it last; by the same thread
  // `mutex_` guards the following but `trained_`. The thread of `run` writes `world_`, `meeting_`,
  // `joined_` and `entered_`; the reading thread writes `latest_`, `leaving_` and `orphaned_`. No
  // lock is held while a meeting is interrupted or groups are aborted.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<World> world_;                 // whose groups end with their epoch
  std::shared_ptr<Interruption> meeting_;        // of the ranks that make the group of `joined_`
  std::int64_t joined_ = 0;                      // the epoch that the default group is of
  std::optional<launch::WorkerNotice> entered_;  // of it
  std::int64_t first_ = 0;                       // MUSTER_EPOCH
  std::optional<launch::WorkerNotice> latest_;
  std::vector<Descriptor> memories_;
  bool leaving_ = false;
  bool left_out_ = false;  // the job goes on without this process, which is about to be ended
  bool orphaned_ = false;  // the launcher has ended
  bool trained_ = false;   // all ranks have come to the end of training; by the thread of `run`
  mutable std::mutex keeper_mutex_;  // held while a commit is copied; taken before any other lock
  CommitKeeper* keeper_ = nullptr;
};

}  // namespace muster::elastic
