/// Where a member puts its input for the others: in its line, in the slot beside it, in its
/// windows, or nowhere if peers can read it in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/base/bytes.h"
#include "core/collective/communicator.h"
#include "core/collective/region/quiescence.h"
#include "core/collective/region/transfer_plan.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"

namespace muster::collective::region {

class BufferPlacement {
 public:
  BufferPlacement(shm::GroupSegment& segment, shm::DirectReads& direct_reads,
                  const shm::BufferRing& windows, Quiescence& quiescence,
                  const TransferPlanner& planner, ArenaOf arena)
      : segment_(segment),
        direct_reads_(direct_reads),
        windows_(windows),
        quiescence_(quiescence),
        planner_(planner),
        arena_(arena) {}

  /// Chooses where this member's data of the current call goes and records that in its line. Copies
  /// the data if it goes into the line or the slot. Returns the number of windows that the call has
  /// to fill.
  std::size_t place(const Args& args, const TransferPlan& plan);
  /// Whether readers access memory outside the segment. This member must then wait for them.
  bool has_in_place_readers(const TransferPlan& plan) const;

  /// The arena offset of the memory; nothing if it is not in the arena.
  std::optional<std::uint64_t> arena_offset(ConstBytes memory) const;
  /// The same for memory that peers may write.
  std::optional<std::uint64_t> writable_offset(ConstBytes memory) const;

 private:
  std::size_t place_input(const Args& args, const TransferPlan& plan);
  std::size_t place_slices(const Args& args, const TransferPlan& plan);
  void place_row(const Args& args, const TransferPlan& plan);

  shm::GroupSegment& segment_;
  shm::DirectReads& direct_reads_;
  const shm::BufferRing& windows_;
  Quiescence& quiescence_;
  const TransferPlanner& planner_;
  const ArenaOf arena_;
};

}  // namespace muster::collective::region
