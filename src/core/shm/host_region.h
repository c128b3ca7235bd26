// SPDX-License-Identifier: BSD-3-Clause
/// shm/: the memory that the ranks of one host share, and the tools to use it fast and safely:
/// - `host_region.h`: the region of one host and job.
/// - `region_memory.h`: its layout over a memory file or ordinary memory.
/// - `segment_heap.h`: its heap, which survives the death of any rank at any instruction.
/// - `mailbox.h`: how a rank's threads sleep and how peers wake them.
/// - `arena.h`: the process's heap of memory that peers map (`arena_pages.h`, `arena_heap.h`).
///   `quarantine.h`: arena memory that a stopped peer of a failed call may still write to.
/// - `shared_mapping.h`: memory files (memfd), mapped once per process.
/// - `segment_layout.h`: layout of a group's segment of the region. One member's view of it:
///   `group_segment.h`, `group_peers.h`.
/// - `cache_lines.h`: control over which core owns a cache line.
///
/// May include only base/ and wait/. Knows no messages, channels or collectives: passing
/// descriptors to peers and the protocol of a group belong to the layers above. Tests: `ctest -R
/// '^shm\.'`.
///
/// `HostRegion` is the memory that all ranks of one host and job share: a header, one mailbox per
/// local rank, byte rings for every ordered pair (`core/transport/byte_stream.h`), and a
/// heap of segments that hold the control lines and staging buffers of groups. The lowest local
/// rank creates it and passes it as a sealed memfd over a Unix socket to peers that proved the
/// secret. It is mapped once per process, even if several ranks are threads of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/bytes.h"
#include "core/shm/mailbox.h"
#include "core/shm/process_end.h"
#include "muster/status.h"

namespace muster::shm {

class HostRegion {
 public:
  virtual ~HostRegion() = default;

  /// Job ranks that share this region, ascending, including the caller's. The same on each of them.
  virtual std::span<const int> ranks() const = 0;
  /// The caller's position in `ranks()`.
  virtual int local_rank() const = 0;
  /// Mailbox of the rank at a position of `ranks()`.
  virtual Mailbox& mailbox(int local_rank) = 0;

  /// Whether the ring of a local rank's stream to this one holds bytes. One poll without a lock,
  /// from any thread.
  virtual bool holds_bytes_from([[maybe_unused]] int local_rank) { return false; }

  /// Allocates `bytes` of zeroed memory (64-byte aligned) from the heap of segments. Any rank may
  /// call it; the offset means the same memory on every rank. Thread-safe and safe between
  /// processes. Code::exhausted when the region is full.
  virtual Result<std::uint64_t> claim(std::size_t bytes) = 0;
  /// Frees a segment and returns its pages to the system. Call once, on any rank, when no rank uses
  /// it any more.
  virtual void release(std::uint64_t offset) = 0;
  virtual std::byte* at(std::uint64_t offset) = 0;
  /// Keeps memory returned by `at` mapped after this object is destroyed. Null if that is not
  /// supported.
  virtual std::shared_ptr<void> memory() { return nullptr; }

  /// `bytes` at `offset` of a local rank's arena (`arena.h`), as mapped into this process. Maps on
  /// first use. Null if that rank has no arena that this process can map.
  virtual std::byte* arena_at(int local_rank, std::uint64_t offset, std::size_t bytes) = 0;
  /// Starts mapping a local rank's arena if that takes a round trip to its owner. Never blocks.
  /// Returns true once `arena_at` answers without blocking (null if mapping failed). Until then,
  /// call it again whenever the caller's own mailbox is woken.
  virtual bool arena_ready([[maybe_unused]] int local_rank) { return true; }

  /// The process of a local rank, to check whether it has ended. Null if that cannot be determined
  /// (another pid namespace), and for the caller's own process.
  virtual std::shared_ptr<ProcessEnd> process_of([[maybe_unused]] int local_rank) {
    return nullptr;
  }

  /// Whether this rank can copy any memory of a local rank in place (`read`). Determined by trying,
  /// once that rank is present: the system may forbid it (Yama's ptrace_scope, a container's
  /// seccomp filter) or hide the process (another pid namespace). Thread-safe.
  virtual bool can_read(int local_rank) = 0;
  /// Whether the process of a local rank still has its memory. False once the process has ended or
  /// called exec, if this rank could read that memory before. A system call.
  virtual bool keeps_memory([[maybe_unused]] int local_rank) { return true; }
  /// Copies from `address` in the process of a local rank (including one's own). Returns false if
  /// the process has ended (a process that reuses its pid is recognized), or if it has no memory
  /// there that other processes may read (a driver's mappings, such as pinned memory). `to` may be
  /// partly written then. The memory may change during the read: only the protocol between the two
  /// ranks rules that out. Thread-safe.
  virtual bool read(int local_rank, std::uint64_t address, MutableBytes to) = 0;
};

}  // namespace muster::shm
