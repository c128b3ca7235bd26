// SPDX-License-Identifier: BSD-3-Clause
/// How a dimension is divided among ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "muster/process_group.h"

namespace muster::parallel {

/// Elements [first, first + count) of a dimension.
struct Chunk {
  std::int64_t first, count;
};

/// The part of rank `rank` of `ranks`, as torch.chunk divides: all parts have ceil(size / ranks)
/// elements, but the last one that has any may have fewer, and those after it have none.
inline Chunk chunk_of(std::int64_t size, int ranks, int rank) {
  const std::int64_t each = (size + ranks - 1) / ranks;
  const std::int64_t first = std::min(size, each * rank);
  return {first, std::min(each, size - first)};
}
inline Chunk chunk_of(std::int64_t size, const ProcessGroup& group) {
  return chunk_of(size, group.size(), group.rank());
}

}  // namespace muster::parallel
