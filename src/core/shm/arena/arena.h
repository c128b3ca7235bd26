// SPDX-License-Identifier: BSD-3-Clause
/// A growing heap over a memfd that local peers map on first use. Peers access its buffers in
/// place, so collectives need no copies in and out. There is one arena per process. Address space
/// is reserved once; memory is committed on use and returned by punching holes. The memfd is sealed
/// against shrinking only.
///
/// Memory is committed before `allocate` returns, so a later write cannot raise SIGBUS. A forked
/// child keeps a private copy of what it inherited: its writes are not visible in the parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "muster/status.h"

namespace muster::shm {

struct ArenaLimits {
  /// Maximum committed bytes; 0: the limit of the machine or the control group.
  std::size_t most = 0;
  /// Freed bytes that stay committed for later requests; more than that is returned.
  std::size_t keep = std::size_t{256} << 20;  // limit: a default that users set
};

struct ArenaStats {
  std::size_t bytes_in_use = 0;
  std::size_t bytes_kept = 0;         ///< free but still committed
  std::size_t bytes_quarantined = 0;  ///< freed, but a peer may still write to it
  std::size_t most = 0;               ///< limit on the sum of the three above
  std::uint64_t bytes_returned = 0;   ///< returned to the system, cumulative
  std::uint64_t allocations = 0;      ///< cumulative
};

class Arena {
 public:
  /// The process's arena, created on first use; Code::exhausted where address space is limited
  /// (ulimit -v), as peers could not map it. A forked child creates its own. It can read and
  /// write the inherited memory, but allocating from the inherited arena fails with Code::aborted,
  /// and freeing to it does nothing.
  static Result<Arena*> of_process();
  /// The process's arena if it exists, else null.
  static Arena* if_made();
  /// The arena that contains `memory`: the process's own, or one inherited across a fork. Null if
  /// there is none. Takes no lock.
  static Arena* holder_of(const std::byte* memory);
  virtual ~Arena() = default;

  /// Returns 64-byte aligned memory. Only fresh memory is zeroed. Zero bytes give a valid pointer.
  /// Thread-safe. Code::exhausted names the limit.
  virtual Result<std::byte*> allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* memory) = 0;
  /// Isolates [memory, memory + bytes), which is in use, because a peer may still write to it as
  /// long as `held()` is true. The peer's writes are not visible here from now on: the memory keeps
  /// its contents but becomes private to this process until it is freed, and `offset_of` no longer
  /// finds it. (Exceptions: small blocks, pages in the middle of a block that are only partly
  /// covered, and a system without free memory.) Once freed, the memory is not reused while it is
  /// held. `held` is called on any thread when memory is allocated or freed, and never again after
  /// it has returned false.
  virtual void quarantine(const std::byte* memory, std::size_t bytes,
                          std::function<bool()> held) = 0;
  /// Returns all kept memory to the system. Checks quarantined memory first.
  virtual void trim() = 0;
  /// Applies to later allocations and frees.
  virtual void set_limits(const ArenaLimits& limits) = 0;
  /// Adds to `ArenaLimits::keep`, including later values of it; negative to undo. For callers that
  /// will free memory and allocate the same amount again.
  virtual void keep_more(std::ptrdiff_t bytes) = 0;
  /// The arena offset of [memory, memory + bytes) for peers, if the arena contains it.
  virtual std::optional<std::uint64_t> offset_of(const std::byte* memory,
                                                 std::size_t bytes) const = 0;
  /// The memory at [offset, offset + bytes); null if out of range.
  virtual std::byte* at(std::uint64_t offset, std::size_t bytes) const = 0;
  /// Peers that map the arena from now on map it for reading only, which prevents mistakes, not
  /// malice. Peers that have mapped it already are not asked to write.
  virtual void make_read_only() = 0;
  virtual bool is_read_only() const = 0;
  virtual int descriptor() const = 0;  ///< the memfd, for passing to local peers
  virtual std::size_t bytes_in_use() const = 0;
  virtual ArenaStats stats() const = 0;
};

}  // namespace muster::shm
