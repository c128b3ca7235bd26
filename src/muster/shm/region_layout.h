/// What lies where in a host region. Private to `region_memory.cc` and its parts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "muster/shm/mailbox.h"
#include "muster/shm/region_memory.h"

namespace muster::shm {

inline constexpr std::uint64_t kRegionMagic = 0x316e6f6967657221;  // limit: "!region1"
inline constexpr std::uint32_t kRegionVersion = 3;                 // limit: a version
inline constexpr std::size_t kRegionPage = 4096;                   // limit: of memory
inline constexpr int kSegmentClasses = 48;                         // limit: powers of two

/// Words that processes share must be usable without a lock.
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
  /// The heap (`segment_heap.h`): units handed out by the end so far, and a stack of free blocks
  /// for each class of size.
  alignas(128) std::atomic<std::uint64_t> heap_end;
  std::atomic<std::uint64_t> free_blocks[kSegmentClasses];
};
static_assert(sizeof(RegionHeader) <= kRegionPage);

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> opened;
};

/// Of one place: what shows another process that it can read its owner's memory: `word` stands at
/// `address` there.
struct alignas(64) Card {
  std::atomic<std::uint32_t> process;
  std::atomic<std::uint64_t> address;
  std::atomic<std::uint64_t> word;  ///< written last; 0: not there yet
};

/// Of one ordered pair. Writer and reader each own a pair of cache lines; counts grow for ever and
/// are never reset. What a writer asks of the reader before every message lies apart: the reader's
/// position changes with every message, and each look at its line would fetch it anew.
struct RingControl {
  alignas(128) std::atomic<std::uint64_t> tail;  ///< bytes published
  std::atomic<std::uint32_t> opened;
  std::atomic<std::uint32_t> ended;         ///< the writer publishes nothing more
  std::atomic<std::uint32_t> writer_waits;  ///< set by a writer that found no room, taken back by
                                            ///< the reader that makes some
  alignas(128) std::atomic<std::uint64_t> head;         ///< bytes consumed
  alignas(128) std::atomic<std::uint32_t> reader_gone;  ///< nobody reads any more
};
static_assert(sizeof(RingControl) == 384);

/// Of one unit of the heap, used where a block begins.
struct SegmentEntry {
  std::atomic<std::uint32_t> state;  ///< 0, or 1 + class of the block in use that begins here
  std::atomic<std::uint32_t> next;   ///< the next free block of this class: 1 + its unit, or 0
};

struct RegionLayout {
  std::size_t places;
  std::size_t ring_bytes;
  std::size_t units;
  std::size_t mailboxes, doorbells, cards, controls, entries, rings, segments, total;  ///< offsets
};

RegionLayout layout_of(const RegionShape& shape);

}  // namespace muster::shm
