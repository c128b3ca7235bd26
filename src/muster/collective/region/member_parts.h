/// The parts of one member's side of a group, and how its three ways to carry out a call share
/// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "muster/base/task.h"
#include "muster/collective/region/buffer_placement.h"
#include "muster/collective/region/call_failure.h"
#include "muster/collective/region/call_wait.h"
#include "muster/collective/region/control_lines.h"
#include "muster/collective/region/quiescence.h"
#include "muster/collective/region/source_table.h"
#include "muster/collective/region/transfer_plan.h"
#include "muster/collective/selection.h"
#include "muster/shm/buffer_ring.h"
#include "muster/shm/direct_reads.h"
#include "muster/shm/group_peers.h"
#include "muster/shm/group_segment.h"
#include "muster/shm/host_region.h"
#include "muster/transport/channel.h"
#include "muster/wait/topology.h"

namespace muster::collective::region {

/// Tells a task that it has moved much since it last gave its thread away.
class YieldMeter {
 public:
  explicit YieldMeter(shm::GroupPeers& peers) : peers_(peers) {}
  /// `if (meter.due(bytes)) co_await YieldMeter::yield();`
  bool due(std::size_t bytes);
  /// Gives the thread away once.
  static auto yield() {
    return until([asked = 0]() mutable { return asked++ > 0; });
  }

 private:
  shm::GroupPeers& peers_;
  std::size_t moved_ = 0;
};

struct MemberParts {
  MemberParts(shm::HostRegion& region, std::uint64_t segment_offset, transport::Channel& channel,
              const Selection& selection, ArenaOf arena);

  void begin_call(std::uint64_t sequence);
  /// For tests: as if the calls up to `sequence` had been made, by all members, without windows.
  /// All earlier calls have ended everywhere.
  void count_from(std::uint64_t sequence);
  /// Whether every reader reduces such an all_reduce or reduce for itself; else each member reduces
  /// its share.
  bool one_shot(Op op, std::size_t bytes) const {
    return selection.choose(op, bytes) == Algorithm::one_shot;
  }

  transport::Channel& channel;
  const Selection selection;
  const Topology topology;
  const bool may_block;  ///< the thread may wait: the other ranks are not its own fibers
  shm::GroupSegment segment;
  shm::GroupPeers peers;
  shm::DirectReads direct_reads;
  shm::BufferRing windows, results;
  ControlLines lines;
  CallWait wait;
  CallFailure failure;
  Quiescence quiescence;
  SourceTable sources;
  const TransferPlanner planner;
  BufferPlacement placement;
  YieldMeter meter;

 private:
  void refresh();
};

}  // namespace muster::collective::region
