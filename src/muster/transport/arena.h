/// A growing heap over a memfd that local peers map on first use: buffers taken from it need no copying in and out.
/// One per process; address space is reserved once, memory is committed as it is used and given back by punching holes; the memfd is sealed
/// against shrinking only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "muster/base/status.h"

namespace muster::transport {

class Arena {
 public:
  /// The process's arena, made on first use. A forked child makes one of its own: its parent's is none of its business any more (what it
  /// inherited can be read; allocating from that object fails with Code::aborted, freeing to either does nothing).
  static Result<Arena*> of_process();
  /// The process's arena where one has been made already, else null.
  static Arena* if_made();
  virtual ~Arena() = default;

  /// 64-byte aligned memory, zeroed only where it is fresh; zero bytes give a valid pointer. Thread-safe. Code::exhausted names the limit.
  virtual Result<std::byte*> allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* memory) = 0;
  /// Where [memory, memory + bytes) stands in the arena, if it lies in it.
  virtual std::optional<std::uint64_t> offset_of(const std::byte* memory, std::size_t bytes) const = 0;
  /// The memory at [offset, offset + bytes); null where that lies outside.
  virtual std::byte* at(std::uint64_t offset, std::size_t bytes) const = 0;
  virtual int descriptor() const = 0;  ///< the memfd, for passing to local peers
  virtual std::size_t bytes_in_use() const = 0;
};

}  // namespace muster::transport
