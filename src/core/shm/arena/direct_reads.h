/// Whether the members of a group can copy from each other's memory (`process_vm_readv`).
#pragma once

#include "core/base/bytes.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"

namespace muster::shm {

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
