/// From what users give (a group or none, ranks of the default group or of the group) to what a Request holds.
#pragma once

#include <optional>
#include <string_view>

#include "muster/group/process_group.h"

namespace muster::group {

/// `group`, or the default group; null where this process is no member, so that the call does nothing. Before init_process_group throws.
Group acting(const Group& group, std::string_view call);

/// The position in `group` of the rank that was given in one of two ways; `fallback` (a rank of the default group) where neither was, or an
/// error that names `keyword`.
int group_rank(const ProcessGroup& group, std::string_view call, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback = {});

}  // namespace muster::group
