#include "core/shm/group_peers.h"

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

}  // namespace muster::shm
