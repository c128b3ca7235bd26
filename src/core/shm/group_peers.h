/// The members of a group as ranks of this host, indexed by group position: their mailboxes,
/// arenas, processes and memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/bytes.h"
#include "core/shm/host_region.h"

namespace muster::shm {

class GroupPeers {
 public:
  /// `members`: job ranks in group order, all in `region`. `rank`: the caller's position.
  GroupPeers(HostRegion& region, std::span<const int> members, int rank);
  GroupPeers(const GroupPeers&) = delete;
  GroupPeers& operator=(const GroupPeers&) = delete;

  /// Wakes sleeping peers after something was published for them.
  void wake();
  void wake_self() { region_.mailbox(local_[static_cast<std::size_t>(rank_)]).wake(); }

  /// See `HostRegion`.
  bool arena_ready(int member) { return region_.arena_ready(local(member)); }
  std::byte* arena_at(int member, std::uint64_t offset, std::size_t bytes) {
    return region_.arena_at(local(member), offset, bytes);
  }
  bool can_read(int member) { return region_.can_read(local(member)); }
  bool read(int member, std::uint64_t address, MutableBytes to) {
    return region_.read(local(member), address, to);
  }
  std::shared_ptr<ProcessEnd> process_of(int member) { return region_.process_of(local(member)); }
  /// Keeps the region's memory mapped.
  std::shared_ptr<void> memory() { return region_.memory(); }

 private:
  int local(int member) const { return local_[static_cast<std::size_t>(member)]; }
  bool all_send_barriers() const;

  HostRegion& region_;
  const int rank_;
  std::vector<int> local_;  // position in the region, by member
  std::vector<Mailbox*> others_;
  bool barriers_ = false;  // every sleeping peer sends barriers, so waking needs no fence
};

}  // namespace muster::shm
