/// What each member gives in the call under way, as its line says, and how this member reads or
/// reduces it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/base/status.h"
#include "muster/collective/communicator.h"
#include "muster/collective/region/call_failure.h"
#include "muster/collective/region/transfer_plan.h"
#include "muster/shm/group_peers.h"
#include "muster/shm/group_segment.h"

namespace muster::collective::region {

struct Source {
  shm::BufferLocation location = shm::BufferLocation::nothing;
  const std::byte* data = nullptr;  ///< not of windows, nor of the member's process
  std::size_t bytes = 0;
  std::size_t column = 0;  ///< where this member's part of each window starts
  std::size_t first_window = 0;
  std::uint64_t address = 0;  ///< in the member's process
  bool granted = false;       ///< in its arena: this member reclaims its lines
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

  Source& operator[](int member) { return sources_[static_cast<std::size_t>(member)]; }
  const Source& operator[](int member) const { return sources_[static_cast<std::size_t>(member)]; }

  /// Whether memory of `member` that this one is to read can be read. Its line has been seen.
  bool mapped(const TransferPlan& plan, int member);
  /// Reads from the line, and table, of a member where its data stands.
  Status resolve(const Args& args, const TransferPlan& plan, int member);
  /// The same of a line that gives one input to everybody, of `bytes`, which is to be reduced.
  Status resolve_share(const Args& args, int member, std::size_t bytes);
  /// The same for data that stands beside the line, of a small call. False if it does not, or has
  /// another size than expected.
  bool resolve_staged(const Args& args, const TransferPlan& plan, int member);
  /// Memory of a member's arena that it has told in its line.
  std::byte* arena_at(int member, std::uint64_t offset, std::size_t bytes) {
    return peers_.arena_at(member, offset, bytes);
  }

  /// What is taken from a member in `step`: `bytes` of it, from `at` on. From its process in large
  /// pieces, since each is a system call.
  struct Piece {
    std::size_t at;
    std::size_t bytes;
  };
  Piece piece(const TransferPlan& plan, int member, std::size_t step) const;
  /// Where the chunk of `step` stands, unless in the member's process.
  const std::byte* chunk(const TransferPlan& plan, int member, std::size_t step) const;
  /// Copies a piece into the output.
  Status take(const Args& args, const TransferPlan& plan, int member, std::size_t step);

  /// What `reduce` reads next, of each member.
  const std::byte*& input(int member) { return inputs_[static_cast<std::size_t>(member)]; }
  /// Reduces the inputs of all members into `bytes` from `to` on, and leaves them behind what was
  /// reduced. `reclaims`: the lines of those that are staged for this member alone, or granted to
  /// it.
  void reduce(const Args& args, bool reclaims, std::byte* to, std::size_t bytes);

  /// Whether this call reads peers' own memory: if one of them aborts, what was read may be
  /// anything.
  bool reads_in_place() const { return reads_in_place_; }
  /// Whether it writes to peers' own memory.
  bool uses_grants() const { return uses_grants_; }

 private:
  bool may_reclaim(int member) const {
    const Source& source = (*this)[member];
    return member != segment_.rank() &&
           (shm::is_staged(source.location) ||
            (source.location == shm::BufferLocation::arena && source.granted));
  }

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  CallFailure& failure_;
  std::vector<Source> sources_;
  std::vector<const std::byte*> inputs_;
  bool reads_in_place_ = false;
  bool uses_grants_ = false;
};

}  // namespace muster::collective::region
