#include "core/shm/arena/direct_reads.h"

#include <sys/prctl.h>

namespace muster::shm {

void DirectReads::offer() {
  std::atomic<std::uint32_t>& mine = segment_.progress(segment_.rank()).reads;
  if (mine.load(std::memory_order_relaxed) != 0) return;
  for (int member = 0; member < segment_.size(); ++member) {
    if (member != segment_.rank() && !peers_.can_read(member)) return;
  }
  mine.store(1, std::memory_order_release);
}

bool DirectReads::all_peers_read() {
  for (int member = 0; member < segment_.size() && !all_peers_read_; ++member) {
    if (member != segment_.rank() &&
        segment_.progress(member).reads.load(std::memory_order_acquire) == 0)
      return false;
  }
  return all_peers_read_ = true;
}

bool DirectReads::readable(ConstBytes memory) {
  if (::prctl(PR_GET_DUMPABLE) != 1) return false;
  const auto reads = [&](const std::byte& at) {
    std::byte byte;
    return peers_.read(segment_.rank(), reinterpret_cast<std::uint64_t>(&at), {&byte, 1});
  };
  return memory.empty() || (reads(memory.front()) && reads(memory.back()));
}

}  // namespace muster::shm
