/// A member's windows or result buffers: which one is next, and which peers may still read each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/shm/segment_layout.h"

namespace muster::shm {

/// The last use of a buffer. The buffer is free once `counter` of every peer, or of `reader`, has
/// reached `until`.
struct BufferUse {
  Position until = 0;
  Counter counter = Counter::drained;
  int reader = -1;  ///< the only reader; -1: all peers
  bool pending = false;
};

class BufferRing {
 public:
  /// Index of the next buffer in the ring, as published in a line.
  std::uint8_t next() const { return static_cast<std::uint8_t>(next_ % fixed::kWindows); }
  const BufferUse& last_use_of_next() const { return uses_[next_ % fixed::kWindows]; }
  /// Acquires the next buffer, which must be free, and returns its number.
  std::size_t acquire(Position until, Counter counter, int reader) {
    uses_[next_ % fixed::kWindows] = {until, counter, reader, true};
    return next_++;
  }
  /// Every peer has finished with all buffers.
  void release_all() {
    for (BufferUse& use : uses_) use.pending = false;
  }
  /// The same for buffers whose last use is more than `age` before `now`.
  void release_older(Position now, Position age) {
    for (BufferUse& use : uses_) use.pending = use.pending && now - use.until <= age;
  }

 private:
  std::size_t next_ = 0;
  std::array<BufferUse, fixed::kWindows> uses_{};
};

}  // namespace muster::shm
