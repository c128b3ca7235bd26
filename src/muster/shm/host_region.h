/// shm/: the memory that the ranks of one host share, and what it takes to use it fast and safely.
///
/// What lives here:
/// - `host_region.h`: the region of a host and job.
/// - `region_memory.h`: its layout over a memory file or ordinary memory.
/// - `segment_heap.h`: its heap, which survives the death of any rank at any instruction.
/// - `mailbox.h`: where a rank's threads sleep, and how peers wake them.
/// - `arena.h`: the process's heap of memory that peers map (`arena_heap.h`, `page_ranges.h`).
///   `quarantine.h`: its memory that a stopped peer of a failed call may still write to.
/// - `shared_mapping.h`: memory files (memfd), mapped once per process.
/// - `segment_layout.h`: what stands where in a group's segment of the region. One member's view of
///   it: `group_segment.h`, `group_peers.h`, `buffer_ring.h`, `direct_reads.h`,
///   `core_placement.h`, `outstanding_writers.h`.
/// - `reclaim_lines.h`, `copy_past_caches.h`, `prefetch.h`: which core owns a cache line next.
///
/// May include base/ and wait/ alone. It knows no message, no channel and no collective: how a rank
/// gets a peer's descriptor, and the protocol of a group, stand in the layers above. Test it alone:
/// `ctest -R '^shm\.'`.
///
/// `HostRegion` is the memory that all ranks of one host and job share: a header, one mailbox per
/// local rank, byte rings for every ordered pair (`transport/shared_stream.h`), and a heap of
/// segments from which groups take their control lines and staging buffers. The lowest local rank
/// makes it and passes it as a sealed memfd over a Unix socket to peers that proved the secret. It
/// is mapped once per process, also if several ranks are threads of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/shm/mailbox.h"
#include "muster/shm/process_end.h"

namespace muster::shm {

class HostRegion {
 public:
  virtual ~HostRegion() = default;

  /// Job ranks that share this region, ascending, the caller's own included; the same on each of
  /// them.
  virtual std::span<const int> ranks() const = 0;
  /// Position of the caller in `ranks()`.
  virtual int local_rank() const = 0;
  /// Mailbox of the rank at a position of `ranks()`.
  virtual Mailbox& mailbox(int local_rank) = 0;

  /// Whether bytes of a local rank's stream to this one stand in their ring. One look, of any
  /// thread, without a lock.
  virtual bool holds_bytes_from([[maybe_unused]] int local_rank) { return false; }

  /// Takes `bytes` of zeroed memory (64-byte aligned) from the heap of segments. Any one rank may;
  /// the offset then means the same memory on every rank. Thread-safe and safe between processes.
  /// Code::exhausted when the region is full.
  virtual Result<std::uint64_t> claim(std::size_t bytes) = 0;
  /// Gives a segment back (its pages return to the system). Once, by any rank, when nobody uses it
  /// any more.
  virtual void release(std::uint64_t offset) = 0;
  virtual std::byte* at(std::uint64_t offset) = 0;
  /// Keeps what `at` gives where it is after this object has gone; null where nothing can.
  virtual std::shared_ptr<void> memory() { return nullptr; }

  /// Arena memory of a local rank as seen from this process (`arena.h`): `bytes` at `offset` of
  /// arena `rank`; maps on first use. Null where that rank has no arena that this process can map.
  virtual std::byte* arena_at(int local_rank, std::uint64_t offset, std::size_t bytes) = 0;
  /// Begins to map the arena of a local rank where that takes a round trip to its owner. Never
  /// blocks: true once `arena_at` answers at once (null where it could not be mapped); until then
  /// the caller asks again, and its own mailbox is woken when it should.
  virtual bool arena_ready([[maybe_unused]] int local_rank) { return true; }

  /// The process of a local rank, to be asked whether it has ended. Null where nobody can tell (it
  /// is in another pid namespace), and where it is the caller's.
  virtual std::shared_ptr<ProcessEnd> process_of([[maybe_unused]] int local_rank) {
    return nullptr;
  }

  /// Whether any memory of a local rank can be copied from where it is (`read`). Found out by
  /// trying, once that rank is there: the system may forbid it (Yama's ptrace_scope, a container's
  /// filter of system calls), or hide the process (another pid namespace). Thread-safe.
  virtual bool can_read(int local_rank) = 0;
  /// Whether the process of a local rank still has the memory that it had: false once it has ended,
  /// or runs another program (exec), where this rank could read that memory before. A system call.
  virtual bool keeps_memory([[maybe_unused]] int local_rank) { return true; }
  /// Copies from `address` of the process of a local rank (also one's own). False where the process
  /// has gone (another that has its number now is not taken for it), or has no memory there or none
  /// that the system lets others read (a driver's mappings, as pinned memory); `to` may have been
  /// written then. What it reads may be written meanwhile: only the protocol between the two says
  /// that it is not. Thread-safe.
  virtual bool read(int local_rank, std::uint64_t address, MutableBytes to) = 0;
};

}  // namespace muster::shm
