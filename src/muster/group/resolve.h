/// From what users give (a group or none, ranks of the default group or of the group) to what a
/// Request holds.
#pragma once

#include <exception>
#include <optional>
#include <string_view>
#include <utility>

#include "muster/group/process_group.h"

namespace muster::group {

/// `group`, or the default group; null where this process is no member, so that the call does
/// nothing. Before init_process_group throws.
Group acting(const Group& group, std::string_view call);

/// The position in `group` of the rank that was given in one of two ways; `fallback` (a rank of the
/// default group) where neither was, or an error that names `keyword`.
int group_rank(const ProcessGroup& group, std::string_view keyword, std::optional<int> global_rank,
               std::optional<int> local_rank, std::optional<int> fallback = {});

/// Submits what `make(group)` gives, as an `op` of `name`. What it throws makes it a refused call
/// (`ProcessGroup::refuse`). Null for a non-member.
template <class Make>
WorkRef call(const Group& given, Op op, std::string_view name, Make make) {
  const auto group = acting(given, name);
  if (!group) return nullptr;
  const auto filled = [&] {  // made in place: a request is large to move
    try {
      Request request = make(*group);
      request.op = op;
      request.name = name;
      return request;
    } catch (const std::exception& why) {
      group->refuse(op, name, why);
    }
  };
  return group->submit(filled());
}

}  // namespace muster::group
