/// Moved to wait/.
#pragma once

#include "muster/wait/spin_wait.h"

namespace muster::transport {

inline bool take_woken() { return take_wakeup(); }

}  // namespace muster::transport
