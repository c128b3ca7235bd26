/// Moved to wait/.
#pragma once

#include "muster/wait/spin_wait.h"

namespace muster::transport {

inline void note_headway() { note_progress(); }
inline bool take_headway() { return take_progress(); }

}  // namespace muster::transport
