/// The parts of one member's side of a group, shared by the three ways to execute a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/time/task.h"
#include "core/collective/region/buffer_placement.h"
#include "core/collective/region/call_failure.h"
#include "core/collective/region/call_wait.h"
#include "core/collective/region/control_lines.h"
#include "core/collective/region/quiescence.h"
#include "core/collective/region/source_table.h"
#include "core/collective/region/transfer_plan.h"
#include "core/collective/select/selection.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/shm/host_region.h"
#include "core/transport/channel/channel.h"
#include "core/wait/topology.h"

namespace muster::collective::region {

/// Tells a task when it has moved enough data to yield its thread.
class YieldMeter {
 public:
  explicit YieldMeter(shm::GroupPeers& peers) : peers_(peers) {}
  /// `if (meter.due(bytes)) co_await YieldMeter::yield();`
  bool due(std::size_t bytes);
  /// Yields the thread once.
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
  /// For tests: as if all members had made the calls up to `sequence`, without windows. All earlier
  /// calls must have ended everywhere.
  void count_from(std::uint64_t sequence);
  /// Leaves the segment (`GroupSegment::leave`).
  bool leave();
  /// Whether every reader computes this all_reduce or reduce for itself. Otherwise each member
  /// reduces its share.
  bool one_shot(Op op, std::size_t bytes) const {
    return selection.choose(op, bytes) == Algorithm::one_shot;
  }

  transport::Channel& channel;
  const Selection selection;
  const Topology topology;
  const bool may_block;  ///< false in simulations, which run all ranks as fibers of one thread
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
