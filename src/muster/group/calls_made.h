/// How far a member has come on a group.
#pragma once

#include <cstdint>
#include <optional>

#include "muster/group/process_group.h"

namespace muster::group {

/// Collectives that this member has started on it; absent where the group's backend does not count
/// them.
std::optional<std::uint64_t> calls_made(const ProcessGroup& group);

}  // namespace muster::group
