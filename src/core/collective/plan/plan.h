// SPDX-License-Identifier: BSD-3-Clause
/// Rank arithmetic: which slice, to whom, in which step. A plan is a value computed from (rank,
/// size). It holds no lists, does no I/O, and costs the same for 4 ranks and for 100,000.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tunables/tunables_fixed.h"

namespace muster::collective::plan {

struct Slice {
  std::size_t begin = 0;
  std::size_t count = 0;
  std::size_t end() const { return begin + count; }
};

/// Part `index` of `count` elements cut into `parts` nearly equal parts; the first `count % parts`
/// have one element more.
constexpr Slice slice_of(std::size_t count, int parts, int index) {
  const auto n = static_cast<std::size_t>(parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t share = count / n;
  const std::size_t larger = count % n;
  return {i * share + (i < larger ? i : larger), share + (i < larger ? 1 : 0)};
}

/// Chunk `index` of `count` elements cut every `chunk` elements; empty past the end.
constexpr Slice chunk_of(std::size_t count, std::size_t chunk, std::size_t index) {
  const std::size_t begin = index * chunk;
  if (begin >= count) return {count, 0};
  return {begin, count - begin < chunk ? count - begin : chunk};
}
constexpr std::size_t chunks_in(std::size_t count, std::size_t chunk) {
  return (count + chunk - 1) / chunk;
}
/// A chunk of which `parts` carry so many bytes, in whole elements of any type. Over a long way
/// what is left for one message more would wait for another round trip.
constexpr std::size_t whole_part(std::size_t bytes, std::size_t parts) {
  constexpr std::size_t kWhole = 64;  // limit: a cache line, which all elements divide
  return (bytes + parts * kWhole - 1) / (parts * kWhole) * kWhole;
}
/// Number of messages that carry these chunks. Without data it is one empty message, so that the
/// members meet and their calls are compared.
constexpr std::size_t messages_for(std::size_t count, std::size_t chunk) {
  return count == 0 ? 1 : chunks_in(count, chunk);
}

/// Chunk size per sender at a root that reduces alone, with twice that outstanding: large enough
/// that few messages need an RTS/CTS exchange. All senders together use at most 4 MiB (matters
/// above nine members); the chunk is at least 4 KiB.
constexpr std::size_t direct_chunk_bytes(int size) {
  const std::size_t others = size < 2 ? 1 : static_cast<std::size_t>(size) - 1;
  return std::clamp(fixed::kGatheredMost / (2 * others) / 64 * 64, fixed::kSmallMessage,
                    fixed::kFragmentBytes);
}

/// Whether the root of a direct reduce sends ready-to-receive to the others once its receives are
/// posted, so that they can send their data in two eager messages. Not with two members: neither
/// waits long for RTS/CTS there, and larger chunks are worth the exchange.
constexpr bool direct_uses_rtr(std::size_t bytes, int size) {
  return size > 2 && bytes > fixed::kEagerBytes && bytes <= 2 * fixed::kEagerBytes &&
         direct_chunk_bytes(size) > fixed::kEagerBytes;
}

/// The longest chunk of a direct reduce, of whole elements. `in_flight`: what a long way takes
/// (`Selection::in_flight`), of all senders together; 0: the way is short.
constexpr std::size_t direct_chunk(std::size_t bytes, int size, std::size_t in_flight) {
  if (direct_uses_rtr(bytes, size)) return std::min(bytes, fixed::kEagerBytes);
  const std::size_t others = size < 2 ? 1 : static_cast<std::size_t>(size) - 1;
  const std::size_t usual = direct_chunk_bytes(size);
  const std::size_t far = in_flight / fixed::kReduceDepth / others / 64 * 64;
  const std::size_t part = whole_part(bytes, fixed::kReduceDepth);
  return std::min(bytes, std::clamp(part, usual, std::max(usual, far)));
}

constexpr int wrap(int rank, int size) {
  const int rest = rank % size;
  return rest < 0 ? rest + size : rest;
}

/// Number of steps in which a distance that doubles from 1 covers `size` ranks: ceil(log2).
constexpr int doubling_steps(int size) {
  int steps = 0;
  for (long reach = 1; reach < size; reach *= 2) ++steps;
  return steps;
}

/// The ranks in a ring, from some place on to the places after it.
struct RingPlaces {
  int size;
  /// Ranks by their places, which this does not own; empty: in the order of ranks.
  std::span<const std::uint8_t> order = {};

  int at(int place) const {
    const int wrapped = wrap(place, size);
    return order.empty() ? wrapped : order[static_cast<std::size_t>(wrapped)];
  }
  int place_of(int rank) const {
    return order.empty() ? rank : static_cast<int>(std::ranges::find(order, rank) - order.begin());
  }
};

/// All-gather around a ring: in step s every rank forwards the block that it received in step s - 1
/// (its own in step 0).
struct RingPlan {
  int rank;
  int size;
  std::span<const std::uint8_t> order = {};  ///< as in `RingPlaces`

  int steps() const { return size - 1; }
  int next() const { return from_here(1); }
  int previous() const { return from_here(-1); }
  int sent_block(int step) const { return from_here(-step); }
  int received_block(int step) const { return from_here(-step - 1); }

 private:
  int from_here(int places) const {
    const RingPlaces ring{size, order};
    return ring.at(ring.place_of(rank) + places);
  }
};

/// Every rank meets every other once: in step s (from 1) it sends to the rank s above and receives
/// from the rank s below, so no rank is the target of two in one step.
struct PairwisePlan {
  int rank;
  int size;

  int steps() const { return size - 1; }
  int target(int step) const { return wrap(rank + step, size); }
  int source(int step) const { return wrap(rank - step, size); }
};

/// All-gather in ceil(log2(size)) steps for any size (Bruck et al., 1997). Blocks are in rotated
/// order: position i holds the block of rank `owner(i)`, position 0 the rank's own. Step s sends
/// the first `count(s)` positions to the rank 2^s below and receives as many from the rank 2^s
/// above, which are appended.
struct BruckPlan {
  int rank;
  int size;

  int steps() const { return doubling_steps(size); }
  int distance(int step) const { return 1 << step; }
  int count(int step) const {
    return distance(step) <= size - distance(step) ? distance(step) : size - distance(step);
  }
  int target(int step) const { return wrap(rank - distance(step), size); }
  int source(int step) const { return wrap(rank + distance(step), size); }
  int owner(int position) const { return wrap(rank + position, size); }
};

/// A barrier in the same number of steps: after step s, a rank knows that the 2^(s+1) - 1 ranks
/// below it have arrived.
struct DisseminationPlan {
  int rank;
  int size;

  int steps() const { return doubling_steps(size); }
  int target(int step) const { return wrap(rank + (1 << step), size); }
  int source(int step) const { return wrap(rank - (1 << step), size); }
};

/// A binomial tree below `root`. Its depth and the root's number of children are ceil(log2(size)).
/// The child with the largest subtree comes first and should be served first.
struct TreePlan {
  int rank;
  int size;
  int root;

  /// -1 at the root.
  int parent() const {
    const int position = place();
    return position == 0 ? -1 : at(position & (position - 1));
  }
  int children() const {
    int number = 0;
    for (int bit = 1; bit < lowest_bit() && place() + bit < size; bit *= 2) ++number;
    return number;
  }
  int child(int index) const { return at(place() + (1 << (children() - 1 - index))); }
  TreePlan below(int index) const { return {child(index), size, root}; }
  /// Number of ranks in this rank's subtree: contiguous from its own, wrapping around.
  int subtree() const { return std::min(lowest_bit(), size - place()); }

 private:
  int place() const { return wrap(rank - root, size); }
  int at(int position) const { return wrap(position + root, size); }
  // The subtree of a position: those that differ from it only in lower bits; all for the root.
  int lowest_bit() const { return place() == 0 ? 1 << doubling_steps(size) : place() & -place(); }
};

/// A chain from the root through every rank to the last, around a ring: the longest path, but the
/// least work for the busiest rank.
struct ChainPlan {
  int rank;
  int size;
  int root;
  std::span<const std::uint8_t> order = {};  ///< as in `RingPlaces`

  /// -1 at the root.
  int parent() const { return rank == root ? -1 : RingPlan{rank, size, order}.previous(); }
  int children() const { return child(0) == root ? 0 : 1; }
  int child(int) const { return RingPlan{rank, size, order}.next(); }
};

}  // namespace muster::collective::plan
