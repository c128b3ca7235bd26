// SPDX-License-Identifier: BSD-3-Clause
/// The one class behind `WorldScope`: the default group and the groups made from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/group/group_core.h"
#include "muster/init.h"
#include "muster/key_value_store.h"

namespace muster {

namespace group {
struct Job;  // job.h

/// The place of a rank that is a thread of `spawn`. init_process_group without arguments uses it.
struct SpawnedRank {
  std::shared_ptr<store::Store> store;
  int rank = -1;
  int world_size = -1;
};
}  // namespace group

/// Every WorldScope is one. Thread-safe.
class World final : public WorldScope {
 public:
  static World& current() { return static_cast<World&>(*WorldScope::current()); }

  static std::shared_ptr<World> hold_current() {
    return std::static_pointer_cast<World>(WorldScope::current());
  }

  World() = default;
  explicit World(group::SpawnedRank spawned_rank) : spawned_rank_(std::move(spawned_rank)) {}
  ~World();

  /// Has no store in the process's own scope.
  const group::SpawnedRank& spawned_rank() const { return spawned_rank_; }
  bool initialized() const;
  /// Whether this process opened it, and not a process that this one was forked from. Takes no
  /// lock.
  bool opened_here() const;
  /// The default group. Before init_process_group, throws DistError naming `caller`.
  Group world(std::string_view caller) const;
  std::shared_ptr<group::Job> job(std::string_view caller) const;

  /// Sets job and default group. Throws if there is a default group already.
  void open(std::shared_ptr<group::Job> job, Group world);
  void add(Group group);
  /// The group with that name (`ProcessGroup::name`), including the default group, if this process
  /// is a member; otherwise null.
  Group find(std::string_view name) const;
  /// Number of groups this process is a member of, including the default group.
  std::size_t group_count() const;
  /// All groups this process is a member of; the default group is last.
  std::vector<Group> groups() const;
  /// Replaces the default group after it was shrunk. Returns all previous groups, which end with
  /// it.
  std::vector<Group> replace(std::shared_ptr<group::Job> job, Group world);
  /// Removes `group`, or everything if `group` is null or the default group. Returns the groups to
  /// close, youngest first, and the job if everything ends.
  struct ClosedGroups {
    std::vector<Group> groups;
    std::shared_ptr<group::Job> job;
  };
  ClosedGroups remove(const Group& group, std::string_view caller);
  /// Aborts everything in flight on all groups and tells the other members.
  void abort(const std::string& reason);
  /// Reports this rank's failure: tells the other ranks of its job `why` at once and aborts all its
  /// groups. `earlier` is passed to `transport::Fabric::fail_rank`.
  void fail(const std::string& why, const std::vector<int>& earlier);
  /// Aborts everything in flight because `culprit`, another rank that is a thread of this process,
  /// failed with `why`.
  void end_after(const World& culprit, const std::string& why);
  /// Drops everything without closing it; the other members see this rank leave. In a forked child,
  /// forgets the parent's groups and leaves them untouched.
  void drop();
  /// Returns `text`, then "text (2)", "text (3)", ...: distinguishes groups of the same
  /// description.
  std::string unique_name(const std::string& text);

 private:
  const group::SpawnedRank spawned_rank_ = {};
  // Guards all below but `process_`. Groups and jobs are called, and destroyed, without it.
  mutable std::mutex mutex_;
  std::shared_ptr<group::Job> job_;
  Group world_;
  std::vector<Group> groups_;
  std::map<std::string, std::uint64_t> counts_;
  // The process that opened it: a forked child must not close for its parent.
  std::atomic<int> process_ = 0;
};

}  // namespace muster
