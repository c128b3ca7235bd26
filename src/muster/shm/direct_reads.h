/// Whether the members of a group can copy from each other's memory (`process_vm_readv`).
#pragma once

#include "muster/base/bytes.h"
#include "muster/shm/group_peers.h"
#include "muster/shm/group_segment.h"

namespace muster::shm {

class DirectReads {
 public:
  DirectReads(GroupSegment& segment, GroupPeers& peers) : segment_(segment), peers_(peers) {}

  /// Finds out once whether this member can read every peer's memory, and says so if it can.
  void offer();
  /// Whether every peer has said that it can read this member's memory.
  bool all_peers_read();
  /// Whether peers can read this memory: not what a device's driver has mapped (pinned memory), and
  /// none once the process has closed itself to others (`PR_SET_DUMPABLE`). Tries both ends.
  bool readable(ConstBytes memory);

 private:
  GroupSegment& segment_;
  GroupPeers& peers_;
  bool all_peers_read_ = false;
};

}  // namespace muster::shm
