// SPDX-License-Identifier: BSD-3-Clause
/// Exchanges text among the members of a group, for agreement between calls.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/process_group.h"

namespace muster::group {

/// Limit for one text; a member's announced size is checked before memory is allocated.
inline constexpr std::int64_t kMaxTextBytes = std::int64_t{16} << 20;  // limit: memory

/// Each member contributes a text of at most `kMaxTextBytes` and receives all of them in group
/// order. Two all_gathers, both completed by the deadline (default: the group's timeout from now).
/// `give_up` is polled during the wait; if it fails, the group is aborted, so that every member
/// learns of it, and the failure is thrown.
std::vector<std::string> exchange_text(const Group& group, const std::string& mine,
                                       std::optional<TimePoint> deadline = {},
                                       const std::function<Status()>& give_up = {});

/// A note a member sends with its call. Call and note together fit in one control line of the
/// engine.
using CallNote = std::array<std::int64_t, 2>;

/// Each member describes the groups it is about to create. If one differs, throws on every member
/// and names both calls. Takes one all_gather if all are equal. Returns the members' notes in group
/// order.
std::vector<CallNote> compare_calls(const Group& group, const std::string& mine,
                                    std::optional<TimePoint> deadline = {},
                                    const std::function<Status()>& give_up = {},
                                    const CallNote& note = {});

}  // namespace muster::group
