// SPDX-License-Identifier: BSD-3-Clause
/// The members' inputs to a call: where this member puts its own for the others, and how it reads
/// or reduces theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/bytes.h"
#include "core/collective/communicator.h"
#include "core/collective/region/call_failure.h"
#include "core/collective/region/transfer_plan.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "muster/status.h"

namespace muster::collective::region {

/// Each member's input in the current call, as its line describes it, and how this member reads or
/// reduces it.
struct SourceMemory {
  shm::BufferLocation location = shm::BufferLocation::nothing;
  const std::byte* data = nullptr;  ///< null for windows and for memory of another process
  std::size_t bytes = 0;
  std::size_t column = 0;  ///< start of this member's part in each window
  std::size_t first_window = 0;
  std::uint64_t address = 0;  ///< in the member's process
  bool granted = false;       ///< in its arena, and this member reclaims its lines
};

class SourceTable {
 public:
  SourceTable(shm::GroupSegment& segment, shm::GroupPeers& peers, CallFailure& failure)
      : segment_(segment),
        peers_(peers),
        failure_(failure),
        sources_(segment.layout().members),
        inputs_(segment.layout().members) {}

  void begin_call() { reads_in_place_ = uses_grants_ = false; }

  SourceMemory& operator[](int member) { return sources_[static_cast<std::size_t>(member)]; }
  const SourceMemory& operator[](int member) const {
    return sources_[static_cast<std::size_t>(member)];
  }

  /// Whether `member`'s memory that this member has to read is mapped. Its line must have been
  /// seen.
  bool mapped(const TransferPlan& plan, int member);
  /// Looks up a member's data from its line and table.
  Status resolve(const Args& args, const TransferPlan& plan, int member);
  /// The same for a line with one input of `bytes` for all members, which is to be reduced.
  Status resolve_share(const Args& args, int member, std::size_t bytes);
  /// The same for data beside the line of a small call. Returns false if the data is elsewhere or
  /// its size differs from what is expected.
  bool resolve_staged(const Args& args, const TransferPlan& plan, int member);
  /// Memory of a member's arena that its line refers to.
  std::byte* arena_at(int member, std::uint64_t offset, std::size_t bytes) {
    return peers_.arena_at(member, offset, bytes);
  }

  /// The part of a member's input that is read in `step`: `bytes` from `at` on. Reads from another
  /// process use large pieces, since each is a system call.
  struct SourcePiece {
    std::size_t at;
    std::size_t bytes;
  };
  SourcePiece piece(const TransferPlan& plan, int member, std::size_t step) const;
  /// Address of the chunk of `step`, unless it is in another process.
  const std::byte* chunk(const TransferPlan& plan, int member, std::size_t step) const;
  /// Copies a piece into the output.
  Status copy_piece(const Args& args, const TransferPlan& plan, int member, std::size_t step);

  /// Per member, the address that `reduce` reads next.
  const std::byte*& input(int member) { return inputs_[static_cast<std::size_t>(member)]; }
  /// Reduces the inputs of all members into `bytes` from `to` on, and advances the input addresses
  /// past what was reduced. `reclaims`: also reclaims the lines that only this member reads, either
  /// staged or granted.
  void reduce(const Args& args, bool reclaims, std::byte* to, std::size_t bytes);

  /// Whether this call reads peers' own memory. If such a peer aborts, the data read may be
  /// garbage.
  bool reads_in_place() const { return reads_in_place_; }
  /// Whether this call writes to peers' own memory.
  bool uses_grants() const { return uses_grants_; }

 private:
  bool may_reclaim(int member) const {
    const SourceMemory& source = (*this)[member];
    return member != segment_.rank() &&
           (shm::is_staged(source.location) ||
            (source.location == shm::BufferLocation::arena && source.granted));
  }

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  CallFailure& failure_;
  std::vector<SourceMemory> sources_;
  std::vector<const std::byte*> inputs_;
  bool reads_in_place_ = false;
  bool uses_grants_ = false;
};

/// Chooses the place of a member's input for the others: its line, the slot beside it, its windows,
/// or none if peers can read it in place.
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
