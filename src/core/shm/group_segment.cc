// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/group_segment.h"

namespace muster::shm {

bool GroupSegment::peer_aborted() const {
  for (int member = 0; member < size(); ++member) {
    if (member == rank_) continue;
    const std::uint64_t at = progress(member).aborted.load(std::memory_order_acquire);
    if (at != 0 && at <= sequence_) return true;
  }
  return false;
}

bool GroupSegment::mark_aborted() {
  std::atomic<std::uint64_t>& mine = progress(rank_).aborted;
  if (mine.load(std::memory_order_relaxed) != 0) return false;
  mine.store(sequence_, std::memory_order_release);
  return true;
}

// This member is counted last: until then nobody can free the segment.
bool GroupSegment::leave(std::span<const int> ended) {
  std::atomic<std::uint32_t>& departed = progress(0).departed;
  for (const int member : ended) {
    if (progress(member).left.exchange(1, std::memory_order_relaxed) == 0)
      departed.fetch_add(1, std::memory_order_relaxed);
  }
  // Stored before this member is counted: a process that ends after it has left, or between the
  // two, is not counted again.
  progress(rank_).left.store(1, std::memory_order_relaxed);
  return departed.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(size());
}

}  // namespace muster::shm
