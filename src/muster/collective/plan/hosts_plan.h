#pragma once

#include <algorithm>
#include <cstddef>

#include "muster/collective/plan/slices.h"

namespace muster::collective::plan {

/// Reductions for ranks numbered host by host, `per_host` on each, a divisor of `size`. The data is
/// cut into lanes, one per place on a host. The rank at that place collects its lane from the ranks
/// of its host, adds it to the sum of all previous hosts in rank order, and sends the sum to the
/// rank at its place on the next host; on the last host it is the result. So one sum per lane
/// leaves a host, however many ranks it has.
struct HostsPlan {
  int rank;
  int size;
  int per_host;

  int hosts() const { return size / per_host; }
  int host() const { return rank / per_host; }
  int place() const { return rank % per_host; }
  int rank_of(int host, int place) const { return host * per_host + place; }
  /// The rank at `place` on this host.
  int neighbour(int place) const { return rank_of(host(), place); }
  /// The rank at the same place on the previous and on the next host; -1 if there is none.
  int previous() const { return rank < per_host ? -1 : rank - per_host; }
  int next() const { return rank + per_host >= size ? -1 : rank + per_host; }
  /// Bytes of a lane that are summed at a time: small enough to keep every host busy, but not below
  /// the smallest worthwhile message.
  static std::size_t chunk_bytes(std::size_t lane, int hosts) {
    const auto number = static_cast<std::size_t>(hosts);
    return std::clamp((lane + number - 1) / number, fixed::kLeastMessage, fixed::kReduceChunk);
  }
};

}  // namespace muster::collective::plan
