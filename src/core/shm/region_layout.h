// SPDX-License-Identifier: BSD-3-Clause
/// Layout of a host region. Private to `region_memory.cc` and its parts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/shm/mailbox.h"
#include "core/shm/region_memory.h"

namespace muster::shm {

inline constexpr std::uint64_t kRegionMagic = 0x316e6f6967657221;  // limit: "!region1"
inline constexpr std::uint32_t kRegionVersion = 3;                 // limit: a version
inline constexpr std::size_t kRegionPage = 4096;                   // limit: of memory
inline constexpr int kSegmentClasses = 48;                         // limit: powers of two

/// Words shared between processes must be lock-free.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

struct RegionHeader {
  std::uint64_t magic;  ///< written last
  std::uint32_t version;
  std::uint32_t places;
  std::uint64_t ring_bytes;
  std::uint64_t segment_bytes;
  std::uint64_t total_bytes;
  std::uint64_t nonce;
  /// State of the heap (`segment_heap.h`): the number of units below its end, and a stack of free
  /// blocks for each size class.
  alignas(128) std::atomic<std::uint64_t> heap_end;
  std::atomic<std::uint64_t> free_blocks[kSegmentClasses];
};
static_assert(sizeof(RegionHeader) <= kRegionPage);

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> opened;
};

/// Per rank: lets another process test whether it can read this rank's memory. The value `word` is
/// stored at `address` there.
struct alignas(64) ReadProbe {
  std::atomic<std::uint32_t> process;
  std::atomic<std::uint64_t> address;
  std::atomic<std::uint64_t> word;  ///< written last; 0: not present yet
};

/// Per ordered pair. Writer and reader each own a pair of cache lines. Counts only grow.
/// `reader_gone`, which the writer checks before every message, has its own lines: the reader's
/// position changes with every message, so each check would miss the cache.
struct RingControl {
  alignas(128) std::atomic<std::uint64_t> tail;  ///< bytes published
  std::atomic<std::uint32_t> opened;
  std::atomic<std::uint32_t> ended;         ///< the writer publishes nothing more
  std::atomic<std::uint32_t> writer_waits;  ///< set by a writer that found no room, cleared by the
                                            ///< reader that makes room
  alignas(128) std::atomic<std::uint64_t> head;         ///< bytes consumed
  alignas(128) std::atomic<std::uint32_t> reader_gone;  ///< the reader is gone
};
static_assert(sizeof(RingControl) == 384);

/// Per unit of the heap; used at the start of a block.
struct SegmentEntry {
  std::atomic<std::uint32_t> state;  ///< 0, or 1 + class of the block in use that begins here
  std::atomic<std::uint32_t> next;   ///< the next free block of this class: 1 + its unit, or 0
};

struct RegionLayout {
  std::size_t places;
  std::size_t ring_bytes;
  std::size_t units;
  std::size_t mailboxes, doorbells, read_probes, controls, entries, rings, segments,
      total;  ///< offsets
};

RegionLayout layout_of(const RegionShape& shape);

}  // namespace muster::shm
