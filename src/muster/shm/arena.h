/// A growing heap over a memfd that local peers map on first use: buffers taken from it need no
/// copying in and out. One per process; address space is reserved once, memory is committed as it
/// is used and given back by punching holes; the memfd is sealed against shrinking only.
///
/// Memory is there when `allocate` returns: who writes to it meets no bus error later. A forked
/// child keeps what it inherited as its own copy: what it writes does not show in its parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "muster/base/status.h"

namespace muster::shm {

struct ArenaLimits {
  std::size_t most =
      0;  ///< bytes with memory at one time; 0: what the machine or the control group has
  std::size_t keep =
      std::size_t{256}
      << 20;  ///< bytes of freed memory that stay for the next request; what is more goes back
};

struct ArenaStats {
  std::size_t bytes_in_use = 0;
  std::size_t bytes_kept = 0;         ///< free, with memory
  std::size_t bytes_quarantined = 0;  ///< freed, but kept out of use: a peer may still write to it
  std::size_t most = 0;               ///< the limit of all three together
  std::uint64_t bytes_returned = 0;   ///< to the system, so far
  std::uint64_t allocations = 0;      ///< so far
};

class Arena {
 public:
  /// The process's arena, made on first use. A forked child makes one of its own: its parent's is
  /// none of its business any more (what it inherited can be read and written; allocating from that
  /// object fails with Code::aborted, freeing to either does nothing).
  static Result<Arena*> of_process();
  /// The process's arena where one has been made already, else null.
  static Arena* if_made();
  /// The process's arena, or one inherited over a fork, where `memory` lies in it; else null.
  /// Cheap.
  static Arena* holder_of(const std::byte* memory);
  virtual ~Arena() = default;

  /// 64-byte aligned memory, zeroed only where it is fresh; zero bytes give a valid pointer.
  /// Thread-safe. Code::exhausted names the limit.
  virtual Result<std::byte*> allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* memory) = 0;
  /// A peer may still write to [memory, memory + bytes), in use now, for as long as `held()`. What
  /// it writes does not show here from now on: the memory becomes this process's alone, with what
  /// stands there, until it is freed, and `offset_of` does not know it any more. (Not so of small
  /// blocks, of pages that it fills in part only but at the ends of a block, and where the system
  /// has no memory.) Once freed it gets no other use as long as it is held.
  /// Asked now and then, on any thread, when memory is taken or given back; not any more once it
  /// has said no.
  virtual void quarantine(const std::byte* memory, std::size_t bytes,
                          std::function<bool()> held) = 0;
  /// Gives all memory that is kept for later back to the system. Looks at what is quarantined
  /// first.
  virtual void trim() = 0;
  /// Holds for what is allocated and freed from now on.
  virtual void set_limits(const ArenaLimits& limits) = 0;
  /// Adds to `ArenaLimits::keep`, whatever that is or becomes; negative to take back what was
  /// added. For users who know what they will free and ask for again.
  virtual void keep_more(std::ptrdiff_t bytes) = 0;
  /// Where [memory, memory + bytes) stands in the arena for peers, if it lies in it.
  virtual std::optional<std::uint64_t> offset_of(const std::byte* memory,
                                                 std::size_t bytes) const = 0;
  /// The memory at [offset, offset + bytes); null where that lies outside.
  virtual std::byte* at(std::uint64_t offset, std::size_t bytes) const = 0;
  /// Peers that map the arena from now on can read it only, and those that have mapped it before
  /// are not asked to write.
  virtual void make_read_only() = 0;
  virtual bool is_read_only() const = 0;
  virtual int descriptor() const = 0;  ///< the memfd, for passing to local peers
  virtual std::size_t bytes_in_use() const = 0;
  virtual ArenaStats stats() const = 0;
};

}  // namespace muster::shm
