#include "muster/shm/group_segment.h"

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

}  // namespace muster::shm
