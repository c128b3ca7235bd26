// SPDX-License-Identifier: BSD-3-Clause
/// Ranges of an arena that must not be reused, because a peer of a failed call may still write to
/// them: a peer that was stopped in the middle of a store finishes it when it continues.
/// Bookkeeping over offsets only.
///
/// A failed call adds the ranges that it exposed, each with a predicate that says whether a peer
/// still holds it. A block that the program frees is kept here if it overlaps such a range, and
/// freed once no part of it is held. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/shm/arena/arena_heap.h"
#include "core/shm/process_end.h"
#include "core/shm/segment_layout.h"

namespace muster::shm {

class Quarantine {
 public:
  using Range = FreePages::Range;
  /// Whether a peer may still write. Never true again after it has returned false.
  using Held = std::function<bool()>;
  struct Over {
    std::vector<std::uint64_t> blocks;  ///< offsets of blocks to free now
    std::vector<Held> held;  ///< predicates that are done; the caller destroys them unlocked
  };

  void add(Range range, Held held) { exposed_.push_back({range, std::move(held)}); }
  bool empty() const { return exposed_.empty(); }
  /// Takes over a block that has just been freed. Returns false if no part of it is known to be
  /// held.
  bool keep(Range block);
  /// Calls the predicates. Each block is returned once.
  Over sweep();
  std::size_t bytes() const { return bytes_; }  ///< total size of the kept blocks

 private:
  struct ExposedRange {
    Range range;
    Held held;
  };
  bool overlaps(const Range& block) const;

  std::vector<ExposedRange> exposed_;
  std::vector<Range> kept_;
  std::size_t bytes_ = 0;
};

/// Peers that may be in the middle of a store into this process's memory after a call has failed.
/// Called by the arena's quarantine, which may outlive the group and its member. A peer counts as
/// dead only when its process has ended; a silent peer may just be stopped.
class OutstandingWriters {
 public:
  /// `region` keeps `MemberProgress` mapped. (A member with memory in
  /// quarantine does not leave its group's segment, which is therefore not freed.)
  explicit OutstandingWriters(std::shared_ptr<void> region) : region_(std::move(region)) {}
  /// `peer` has finished once its counter `done` has reached `end`.
  void add(const MemberProgress& peer, Counter done, Position end,
           std::shared_ptr<ProcessEnd> process) {
    peers_.push_back({&peer, done, end, std::move(process)});
  }
  /// Whether any peer may still store. Never true again after it has returned false.
  bool operator()();

 private:
  struct WriterPeer {
    const MemberProgress* progress;
    Counter done;
    Position end;
    std::shared_ptr<ProcessEnd> process;
  };
  std::shared_ptr<void> region_;
  std::vector<WriterPeer> peers_;
};

}  // namespace muster::shm
