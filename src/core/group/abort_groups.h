/// Aborts several groups.
#pragma once

#include <span>
#include <string>

#include "muster/process_group.h"

namespace muster {

/// The calls of all groups on backends of muster's end before any code of the program runs: the
/// `abort` of backends that it has registered, and observers. If that never returns, it holds up
/// what it is of the same kind and comes later, but no end of a call on a backend of muster's. No
/// group may be null.
void abort_groups(std::span<const Group> groups, const std::string& reason);

}  // namespace muster
