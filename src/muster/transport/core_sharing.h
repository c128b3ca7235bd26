/// Moved to wait/.
#pragma once

#include "muster/wait/topology.h"

namespace muster::transport {

/// What an answer takes that is on its way: so long a thread waits for it before others need know
/// that it waits.
inline constexpr Duration kRoundTrip = std::chrono::microseconds(50);

using muster::ranks_per_core;

inline Duration until_all_came_round(Duration once, int per_core) {
  Topology topology;
  topology.ranks_per_core = per_core;
  return topology.rounds(once);
}

}  // namespace muster::transport
