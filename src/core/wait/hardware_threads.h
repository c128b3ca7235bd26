/// The hardware threads that the calling thread may run on, by the system's numbers. `cores.h` says
/// which of them share a core.
#pragma once

#include <vector>

#include "muster/status.h"

namespace muster {

/// Those of the calling thread's affinity mask, in order; none where the system does not tell.
std::vector<int> own_hardware_threads();

/// From now on the calling thread, and what it starts, runs there alone. Fails, and leaves it where
/// it may run now, where there is no such hardware thread or this process may not have it.
Status bind_to_hardware_thread(int number);

}  // namespace muster
