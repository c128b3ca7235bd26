// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/resolve.h"

#include <string>

#include "core/group/errors.h"
#include "core/group/world.h"

namespace muster::group {

Group group_or_default(const Group& group, std::string_view call) {
  return group ? group : World::current().world(call);
}

Group acting(const Group& group, std::string_view call) {
  auto which = group_or_default(group, call);
  return which->is_member() ? which : nullptr;
}

int group_rank(const ProcessGroup& group, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback) {
  const std::string name(keyword);
  if (global_rank && local_rank)
    invalid(name + " and group_" + name + " exclude each other; give one of them");
  if (local_rank) {
    group.global_rank_of(*local_rank);  // throws where there is no such rank
    return *local_rank;
  }
  if (!global_rank) global_rank = fallback;
  if (!global_rank)
    invalid("needs " + name + " (a rank of the default group) or group_" + name +
            " (a rank of the group)");
  return group.group_rank_of(*global_rank);
}

}  // namespace muster::group
