/// Texts among the members of a group, for agreements between calls.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/group/process_group.h"

namespace muster::group {

/// Every member gives a text and gets all of them, in group order. Two all_gathers of the group,
/// both done by the deadline; absent: the group's timeout from now on. `give_up` is asked now and
/// then while it waits; its failure aborts the group, so that every member learns it, and is
/// thrown.
std::vector<std::string> exchange_text(const Group& group, const std::string& mine,
                                       std::optional<TimePoint> deadline = {},
                                       const std::function<Status()>& give_up = {});

/// What a member tells beside its call. Call and note together fit into a control line of the
/// engine.
using CallNote = std::array<std::int64_t, 2>;

/// Every member describes the groups that it is about to make. Throws on every member where one
/// makes other ones, naming both calls. One all_gather where all are the same. Returns the members'
/// notes, in group order.
std::vector<CallNote> compare_calls(const Group& group, const std::string& mine,
                                    std::optional<TimePoint> deadline = {},
                                    const std::function<Status()>& give_up = {},
                                    const CallNote& note = {});

}  // namespace muster::group
