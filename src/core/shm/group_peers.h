// SPDX-License-Identifier: BSD-3-Clause
/// The members of a group as ranks of this host, indexed by group position: their mailboxes,
/// arenas, processes and memory.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/bytes.h"
#include "core/shm/group_segment.h"
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

/// Whether the awaited members may need this member's processor.
enum class MissingPeers : std::uint8_t {
  none,
  elsewhere,  ///< all on other processors than this member's
  here,       ///< at least one may need this processor
};

/// Among the members in [first, last).
template <class IsMissing, class IsElsewhere>
MissingPeers missing_among(int first, int last, IsMissing is_missing, IsElsewhere is_elsewhere) {
  MissingPeers found = MissingPeers::none;
  for (int member = first; member < last; ++member) {
    if (!is_missing(member)) continue;
    if (!is_elsewhere(member)) return MissingPeers::here;
    found = MissingPeers::elsewhere;
  }
  return found;
}

/// The processors on which the members of a group run, as far as they have published them.
class CorePlacement {
 public:
  explicit CorePlacement(GroupSegment& segment) : segment_(segment) {}

  /// Publishes the processor on which this thread runs.
  void publish() {
    const auto core = static_cast<std::uint32_t>(::sched_getcpu() + 1);
    if (core != core_)
      segment_.progress(segment_.rank()).core.store(core_ = core, std::memory_order_relaxed);
  }
  /// Whether a member is known to run on another processor.
  bool is_elsewhere(int member) const {
    const std::uint32_t theirs = segment_.progress(member).core.load(std::memory_order_relaxed);
    return core_ != 0 && theirs != 0 && theirs != core_;
  }

 private:
  GroupSegment& segment_;
  std::uint32_t core_ = 0;  // as published
};

/// Whether the members of a group can copy from each other's memory (`process_vm_readv`).
class DirectReads {
 public:
  DirectReads(GroupSegment& segment, GroupPeers& peers) : segment_(segment), peers_(peers) {}

  /// Tests once whether this member can read every peer's memory, and publishes a positive result.
  void offer();
  /// Whether every peer has published that it can read this member's memory.
  bool all_peers_read();
  /// Whether peers can read this memory. They cannot read memory mapped by a device driver (pinned
  /// memory), nor any memory of a process that is not dumpable (`PR_SET_DUMPABLE`). Tests the first
  /// and the last byte.
  bool readable(ConstBytes memory);

 private:
  GroupSegment& segment_;
  GroupPeers& peers_;
  bool all_peers_read_ = false;
};

}  // namespace muster::shm
