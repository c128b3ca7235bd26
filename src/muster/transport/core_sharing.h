/// How long threads wait by looking, where every rank has a core and where ranks share cores.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "muster/base/clock.h"

namespace muster::transport {

/// What an answer takes that is on its way: so long a thread waits for it before others need know
/// that it waits.
inline constexpr Duration kRoundTrip = std::chrono::microseconds(50);

/// Ranks of one host for each of its `cores` (at least 1), rounded up: 1 where every rank has a
/// core.
inline int ranks_per_core(std::size_t ranks, int cores) {
  const auto count = static_cast<std::size_t>(cores);
  return static_cast<int>((ranks + count - 1) / count);
}

/// How long a thread gives its core away again and again: `once` for each rank that shares it,
/// since all of them have to come round; together below what counts as late.
inline Duration until_all_came_round(Duration once, int per_core) {
  constexpr int kMostRounds = 8;
  return once * std::clamp(per_core, 1, kMostRounds);
}

}  // namespace muster::transport
