// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/group_peers.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>

#include "core/base/threads/host_barrier.h"

namespace muster::shm {

GroupPeers::GroupPeers(HostRegion& region, std::span<const int> members, int rank)
    : region_(region), rank_(rank) {
  const auto ranks = region.ranks();
  for (const int member : members) {
    local_.push_back(
        static_cast<int>(std::find(ranks.begin(), ranks.end(), member) - ranks.begin()));
    if (local_.size() != static_cast<std::size_t>(rank) + 1)
      others_.push_back(&region.mailbox(local_.back()));
  }
}

bool GroupPeers::all_send_barriers() const {
  return takes_host_barriers() &&
         std::all_of(others_.begin(), others_.end(), [](const Mailbox* mailbox) {
           return mailbox->sends_barriers.load(std::memory_order_relaxed) != 0;
         });
}

void GroupPeers::wake() {
#if defined(__SANITIZE_THREAD__)
  for (Mailbox* mailbox : others_) mailbox->wake();
#else
  // At most one fence for all peers. It orders the publication before the check for sleepers
  // (`Mailbox::wake`).
  if (barriers_ || (barriers_ = all_send_barriers())) {
    meet_host_barrier();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  for (Mailbox* mailbox : others_) mailbox->wake_announced();
#endif
}

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
