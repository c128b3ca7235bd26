/// Aborts several groups.
#pragma once

#include <span>
#include <string>

#include "muster/process_group.h"

namespace muster {

/// The calls of all groups end before the observer of the first is told: an observer that never
/// returns holds up no end of calls. A backend whose own `abort` never returns does. No group may
/// be null.
void abort_groups(std::span<const Group> groups, const std::string& reason);

}  // namespace muster
