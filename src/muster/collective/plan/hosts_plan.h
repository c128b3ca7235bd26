#pragma once

#include <algorithm>
#include <cstddef>

#include "muster/collective/plan/slices.h"

namespace muster::collective::plan {

/// Ranks numbered host by host, `per_host` on each, a divisor of `size`. Every rank owns a piece of
/// the data. Within a host, the rank at each place handles what the ranks at that place on all
/// hosts own: it sums it for its host before it leaves the host, and distributes it within the host
/// when it arrives. So a host sends and receives every byte once, however many ranks it has.
struct HostsPlan {
  int rank;
  int size;
  int per_host;

  int hosts() const { return size / per_host; }
  int host() const { return rank / per_host; }
  int place() const { return rank % per_host; }
  int host_of(int other) const { return other / per_host; }
  int rank_of(int host, int place) const { return host * per_host + place; }
  /// The rank at `place` on this host.
  int neighbour(int place) const { return rank_of(host(), place); }
  /// The rank at this place on `host`.
  int peer(int host) const { return rank_of(host, place()); }
  /// The `index`-th place, or host, without this rank's own.
  int other_place(int index) const { return index < place() ? index : index + 1; }
  int other_host(int index) const { return index < host() ? index : index + 1; }

  /// The pieces of a broadcast: one for each rank that is not on the root's host.
  int broadcast_pieces() const { return size - per_host; }
  /// The number of the piece that `owner` forwards, which is not on the root's host.
  int broadcast_piece(int owner, int root) const {
    return owner < host_of(root) * per_host ? owner : owner - per_host;
  }

  /// Bytes of a piece that move at a time: enough rounds to keep the hosts and the wires between
  /// them busy at once, but no message below the smallest worthwhile one; less among many ranks,
  /// which each take a buffer. A host of one rank has no work within it to overlap with the wire:
  /// eager messages, which wait for no answer, keep that busy.
  std::size_t chunk_bytes(std::size_t piece) const {
    const std::size_t most =
        std::clamp(fixed::kGatheredMost / static_cast<std::size_t>(size), fixed::kLeastMessage,
                   per_host > 1 ? fixed::kReduceChunk : fixed::kEagerBytes);
    return per_host > 1 ? std::clamp(piece / fixed::kForwardDepth, fixed::kLeastMessage, most)
                        : most;
  }
};

}  // namespace muster::collective::plan
