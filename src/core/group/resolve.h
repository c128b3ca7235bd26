/// Resolves user arguments: a group or null, and ranks of the default group or of the group.
#pragma once

#include <optional>
#include <string_view>

#include "core/group/group_core.h"
#include "core/group/world.h"
#include "muster/process_group.h"

namespace muster::group {

/// `group`, or the default group if null. Throws before init_process_group.
Group group_or_default(const Group& group, std::string_view call);

/// `group`, or the default group if null. Returns null on a non-member, whose calls do nothing.
/// Throws before init_process_group.
Group acting(const Group& group, std::string_view call);

/// As `acting`, for the duration of one call; takes no lock and no reference count for the default
/// group. Also returns the group of a non-member.
class ActingGroup {
 public:
  ActingGroup(const Group& given, std::string_view call)
      : held_(given ? World::SharedHold() : World::current().hold()),
        group_(given ? &core_of(given) : held_.get()) {
    if (group_ == nullptr) [[unlikely]]
      group_ = &core_of(kept_ = World::current().world(call));
  }

  GroupCore& operator*() const { return *group_; }
  GroupCore* operator->() const { return group_; }

 private:
  const World::SharedHold held_;
  Group kept_;
  GroupCore* group_;
};

/// The group rank of a rank given in one of two ways. If neither is given, uses `fallback`, a rank
/// of the default group, or throws an error that names `keyword`.
int group_rank(const ProcessGroup& group, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback = {});

}  // namespace muster::group
