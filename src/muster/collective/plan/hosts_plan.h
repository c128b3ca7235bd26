#pragma once

#include <algorithm>
#include <cstddef>

#include "muster/collective/plan/slices.h"

namespace muster::collective::plan {

/// Reductions of ranks that stand host by host, `per_host` on each, a divisor of `size`. What is
/// reduced is cut into lanes, one for each place on a host. The rank at that place collects its
/// lane from the ranks of its host, adds it to the sum of all hosts before, in the order of the
/// ranks, and hands the sum to the rank at its place on the next host; on the last host it is the
/// result. So of every lane one sum leaves a host, however many ranks there are on it.
struct HostsPlan {
  int rank;
  int size;
  int per_host;

  int hosts() const { return size / per_host; }
  int host() const { return rank / per_host; }
  int place() const { return rank % per_host; }
  int rank_of(int host, int place) const { return host * per_host + place; }
  /// On this rank's host.
  int neighbour(int place) const { return rank_of(host(), place); }
  /// At this rank's place on the host before and on the one after; -1 where there is none.
  int previous() const { return rank < per_host ? -1 : rank - per_host; }
  int next() const { return rank + per_host >= size ? -1 : rank + per_host; }
  /// What of a lane is summed at a time: so little that every host has something to do, unless that
  /// is too little to be worth a message.
  static std::size_t chunk_bytes(std::size_t lane, int hosts) {
    const auto number = static_cast<std::size_t>(hosts);
    return std::clamp((lane + number - 1) / number, fixed::kLeastMessage, fixed::kReduceChunk);
  }
};

}  // namespace muster::collective::plan
