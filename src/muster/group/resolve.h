/// From what users give (a group or none, ranks of the default group or of the group) to what a
/// call holds.
#pragma once

#include <optional>
#include <string_view>

#include "muster/group/process_group.h"
#include "muster/group/world.h"

namespace muster::group {

/// `group`, or the default group; null where this process is no member, so that the call does
/// nothing. Before init_process_group throws.
Group acting(const Group& group, std::string_view call);

/// The same for the length of one call, without a lock or a count where it is the default group;
/// the group also of a process that is no member.
class ActingGroup {
 public:
  ActingGroup(const Group& given, std::string_view call)
      : held_(given ? WorldScope::Hold() : WorldScope::current()->hold()),
        group_(given ? given.get() : held_.get()) {
    if (group_ == nullptr) [[unlikely]]
      group_ = (kept_ = WorldScope::current()->world(call)).get();
  }

  ProcessGroup& operator*() const { return *group_; }
  ProcessGroup* operator->() const { return group_; }

 private:
  const WorldScope::Hold held_;
  Group kept_;
  ProcessGroup* group_;
};

/// The position in `group` of the rank that was given in one of two ways; `fallback` (a rank of the
/// default group) where neither was, or an error that names `keyword`.
int group_rank(const ProcessGroup& group, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback = {});

}  // namespace muster::group
