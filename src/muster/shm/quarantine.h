/// Which bytes of an arena are kept out of use, since a peer of a failed call may still write to
/// them: one that was stopped in the middle of a store does so when it goes on. Pure bookkeeping
/// over offsets.
///
/// A failed call adds what it has lent, with somebody to ask who holds it still. A block that the
/// program frees meanwhile is kept here where it overlaps with such a range, and given back once
/// nobody holds any of it. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "muster/shm/arena_heap.h"

namespace muster::shm {

class Quarantine {
 public:
  using Range = FreePages::Range;
  /// Whether a peer may still write; once not, never again.
  using Held = std::function<bool()>;
  struct Over {
    std::vector<std::uint64_t> blocks;  ///< where those begin that are to be freed now
    std::vector<Held>
        held;  ///< of what nobody holds any more, for the caller to drop outside of its lock
  };

  void add(Range range, Held held) { lent_.push_back({range, std::move(held)}); }
  bool empty() const { return lent_.empty(); }
  /// Takes a block over that has just been freed; false where no part of it is held, as far as is
  /// known.
  bool keep(Range block);
  /// Asks who holds what. Blocks are given once.
  Over sweep();
  std::size_t bytes() const { return bytes_; }  ///< of the blocks kept

 private:
  struct Lent {
    Range range;
    Held held;
  };
  bool overlaps(const Range& block) const;

  std::vector<Lent> lent_;
  std::vector<Range> kept_;
  std::size_t bytes_ = 0;
};

}  // namespace muster::shm
