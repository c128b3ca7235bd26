/// Rank arithmetic: which slice, to whom, in which step. A plan is a value computed from (rank,
/// size). It holds no lists, does no I/O, and costs the same for 4 ranks and for 100,000.
#pragma once

#include <algorithm>
#include <cstddef>

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

}  // namespace muster::collective::plan
