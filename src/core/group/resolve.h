// SPDX-License-Identifier: BSD-3-Clause
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

/// As `acting`, for the duration of one call. Also returns the group of a non-member. The caller
/// keeps a given group.
class ActingGroup {
 public:
  ActingGroup(const Group& given, std::string_view call)
      : kept_(given ? Group() : World::current().world(call)),
        group_(core_of(given ? given : kept_)) {}

  GroupCore& operator*() const { return group_; }
  GroupCore* operator->() const { return &group_; }

 private:
  const Group kept_;
  GroupCore& group_;
};

/// The group rank of a rank given in one of two ways. If neither is given, uses `fallback`, a rank
/// of the default group, or throws an error that names `keyword`.
int group_rank(const ProcessGroup& group, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback = {});

}  // namespace muster::group
