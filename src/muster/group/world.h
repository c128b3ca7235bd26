/// Where the default group stands: the only state of the API level that is not in an object of the
/// user's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/base/atomic_shared_ptr.h"
#include "muster/group/process_group.h"
#include "muster/store/store.h"

namespace muster {

namespace group {
struct Job;  // job.h

/// Where a rank that is a thread of `spawn` belongs: what init_process_group goes by there when it
/// is told nothing.
struct Seat {
  std::shared_ptr<store::Store> store;
  int rank = -1;
  int world_size = -1;
};
}  // namespace group

/// The default group and the groups made after it. One belongs to the process; where ranks are
/// threads, each rank's thread binds one of its own
/// (`Binding`; `spawn` does that). Objects capture their group when they are made and never look
/// here again. Thread-safe.
class WorldScope {
 public:
  /// The calling thread's, else the process's.
  static const std::shared_ptr<WorldScope>& current();

  /// Makes `scope` the calling thread's as long as it lives. Also for helper threads of a rank that
  /// is a thread.
  class Binding {
   public:
    explicit Binding(std::shared_ptr<WorldScope> scope);
    ~Binding();
    Binding(const Binding&) = delete;
    Binding& operator=(const Binding&) = delete;

   private:
    const std::shared_ptr<WorldScope> scope_;
    const std::shared_ptr<WorldScope>* const before_;
  };

  WorldScope() = default;
  explicit WorldScope(group::Seat seat) : seat_(std::move(seat)) {}
  ~WorldScope();
  WorldScope(const WorldScope&) = delete;
  WorldScope& operator=(const WorldScope&) = delete;

  /// Without a store in the process's own scope.
  const group::Seat& seat() const { return seat_; }
  bool initialized() const;
  /// The default group; before init_process_group throws DistError naming `caller`.
  Group world(std::string_view caller) const;
  /// The same for the length of one call, without a lock; null before init_process_group.
  using Hold = AtomicSharedPtr<ProcessGroup>::Hold;
  Hold hold() const { return Hold(held_); }
  std::shared_ptr<group::Job> job(std::string_view caller) const;

  /// Throws when there is a default group already.
  void open(std::shared_ptr<group::Job> job, Group world);
  void add(Group group);
  /// The group of that name (`ProcessGroup::name`) of which this process is a member, the default
  /// group too; null where there is none.
  Group find(std::string_view name) const;
  /// After the default group was shrunk: its successor takes its place. Returns all groups that
  /// there were, which end with it.
  std::vector<Group> replace(std::shared_ptr<group::Job> job, Group world);
  /// Takes out `group`, or everything for the default group (null or itself): the groups to close,
  /// youngest first, and the job where all of it ends.
  struct Closing {
    std::vector<Group> groups;
    std::shared_ptr<group::Job> job;
  };
  Closing remove(const Group& group, std::string_view caller);
  /// Ends everything in flight on all groups and tells the other members.
  void abort(const std::string& reason);
  /// This rank has failed: the other ranks of its job are told `why` at once, and all its groups
  /// end. `earlier` as `transport::Fabric::fail_rank` takes it.
  void fail(const std::string& why, const std::vector<int>& earlier);
  /// Another rank that is a thread of this process has failed, for `why`: ends everything in
  /// flight.
  void end_after(const WorldScope& culprit, const std::string& why);
  /// Lets everything go without closing it: the other members see this rank leave. In a forked
  /// child, where it is the parent's, forgets it.
  void drop();
  /// `text`, then "text (2)", "text (3)", ...: tells groups of the same description apart.
  std::string unique_name(const std::string& text);

 private:
  const group::Seat seat_ = {};
  mutable std::mutex mutex_;
  std::shared_ptr<group::Job> job_;
  Group world_;
  AtomicSharedPtr<ProcessGroup> held_;  // the same
  std::vector<Group> groups_;
  std::map<std::string, std::uint64_t> counts_;
  int process_ = 0;  // where it was opened: a forked child must not say goodbye for its parent
};

}  // namespace muster
