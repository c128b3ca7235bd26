// SPDX-License-Identifier: BSD-3-Clause
/// Layout of a group's segment of the host region: arithmetic and plain structs.
/// docs/internals/shm.md explains the protocol.
/// - lines: per member, a ring of control lines, one per outstanding call
/// - progress: per member, one line of counters
/// - staging: per member, a small slot per line, fixed::kWindows windows (outgoing inputs) and
///   fixed::kWindows results (reduced slices)
///
/// Every word but `left` and `departed` has a single writer, its member, and nothing is ever reset.
/// (Readers of staged memory reclaim its lines, which leaves the values unchanged:
/// `core/shm/cache_lines.h`.)
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/tunables/tunables.h"

namespace muster::shm {

inline constexpr std::size_t kCacheLine = 64;  // limit: of every processor that muster knows

/// Slices of at least this size are read directly from the sender's memory (process_vm_readv).
/// Below it, staging is faster.
inline std::size_t direct_read_bytes(std::size_t members) {
  return members == 2 ? tunables().direct_read_pair : tunables().direct_read;
}

/// The place of a member's data.
enum class BufferLocation : std::uint8_t {
  nothing,   ///< no bytes
  line,      ///< in the control line
  slot,      ///< in the slot beside it
  line_row,  ///< equally long slices for all other members, contiguous, in the line
  slot_row,  ///< the same in the slot, without a table
  window,    ///< in the windows, chunk by chunk
  arena,     ///< in place: at an offset of the member's arena
  memory,    ///< in place: at an address of the member's process; the reader copies from there
};

/// Whether readers access the member's own memory. The member must then wait for them.
constexpr bool in_place(BufferLocation location) {
  return location == BufferLocation::arena || location == BufferLocation::memory;
}

/// Whether the data is in a slot or passes through windows. The writer refills those lines once all
/// readers have finished.
constexpr bool is_staged(BufferLocation location) {
  return location == BufferLocation::slot || location == BufferLocation::slot_row ||
         location == BufferLocation::window;
}

/// Whether it is a row of equally long slices, one per other member.
constexpr bool is_row(BufferLocation location) {
  return location == BufferLocation::line_row || location == BufferLocation::slot_row;
}

/// Index in a member's row of the slice for `reader`.
constexpr std::size_t place_in_row(int member, int reader) {
  return static_cast<std::size_t>(reader < member ? reader : reader - 1);
}

/// One call of one member. Written before `sequence` is stored; overwritten only after every member
/// has `seen` it.
struct alignas(2 * kCacheLine) Line {
  std::atomic<std::uint64_t> sequence;  ///< of the call in this line
  std::uint64_t seen;  ///< the writer has finished with every member's lines up to this sequence
  std::uint8_t op, dtype, reduce, flags;
  std::int32_t root;
  std::uint64_t count;
  std::uint64_t digest;
  std::uint64_t bytes;  ///< of the input; with a slice per member, of all slices together
  /// Of the input. With slices: a row, `slot` or `window`, whatever the table says of each slice.
  BufferLocation location;
  BufferLocation output_location;  ///< `arena`: peers may store results straight into the output
  std::uint8_t first_window;
  std::uint8_t first_result;
  union {
    struct {
      std::uint64_t input;   ///< arena offset, or address
      std::uint64_t output;  ///< arena offset
    };
    std::byte payload[fixed::kInlineBytes];  ///< if `location` is in the line
  };
};
static_assert(sizeof(Line) == 2 * kCacheLine &&
              offsetof(Line, payload) + fixed::kInlineBytes == sizeof(Line));
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// A point in the life of the group: call and step. Counters hold positions, so a member that has
/// finished a call has passed all its steps, however many there were. Wraps around; compare with
/// `reached`.
using Position = std::uint64_t;
constexpr Position position(std::uint64_t sequence, std::uint64_t step) {
  return (sequence << 24) + step;
}
constexpr Position end_of(std::uint64_t sequence) { return position(sequence + 1, 0); }
constexpr bool reached(Position counter, Position wanted) {
  return static_cast<std::int64_t>(counter - wanted) >= 0;
}
/// Positions compare correctly over half of their range, 2^39 calls. After this many calls every
/// member refreshes the positions that it keeps of earlier calls.
inline constexpr std::uint64_t kRefreshEvery = std::uint64_t{1} << 32;  // limit: of a counter

enum class Counter : std::uint8_t {
  filled,   ///< windows filled
  reduced,  ///< slices reduced: peers' inputs read, results stored
  drained,  ///< peers' windows, results and arena memory read
};
inline constexpr int kCounters = 3;  // limit: of the enum

struct alignas(2 * kCacheLine) MemberProgress {
  std::atomic<Position> counters[kCounters];
  /// Like Line::seen; updated while the member waits for a free line.
  std::atomic<std::uint64_t> seen;
  /// Sequence of the call that failed on this member; 0: none. Never cleared.
  std::atomic<std::uint64_t> aborted;
  /// 1: the member can read the memory of all others. Never cleared.
  std::atomic<std::uint32_t> reads;
  /// 1 + the processor on which the member last blocked in a call; 0: unknown.
  std::atomic<std::uint32_t> core;
  /// 1: the member no longer uses the segment (`GroupSegment::leave`). Never cleared. A member that
  /// leaves stores it for those whose processes have ended.
  std::atomic<std::uint32_t> left;
  /// In the first member's only: how many members have left. Every member adds to it.
  std::atomic<std::uint32_t> departed;
};

/// An entry of the table at the start of a slot, for operations with a slice per member.
struct ReaderSlice {
  std::uint64_t bytes;
  std::uint64_t where;  ///< byte of the slot, arena offset, or address
  BufferLocation location;
  bool granted;  ///< in the arena, and its only reader reclaims its lines
  std::byte spare[6];
};
static_assert(sizeof(ReaderSlice) == 24);

constexpr std::size_t align_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

struct SegmentLayout {
  explicit constexpr SegmentLayout(int size)
      : members(static_cast<std::size_t>(size)),
        slots(wide() ? fixed::kRegionSlots / 4 : fixed::kRegionSlots),
        table_bytes(align_up(members * sizeof(ReaderSlice), kCacheLine)),
        slot_bytes(align_up(fixed::kSlotBytes + table_bytes, kCacheLine)),
        window_bytes(wide() ? std::max(fixed::kWindowBytes / 2,
                                       members * kCacheLine)  // no column is empty
                            : fixed::kWindowBytes),
        column_bytes(window_bytes / members / kCacheLine * kCacheLine),
        result_bytes(align_up((window_bytes + members - 1) / members, kCacheLine)),
        lines_stride(slots * sizeof(Line) + sizeof(MemberProgress)),
        staging(align_up(members * lines_stride, kPage)),
        staging_stride(
            align_up(slots * slot_bytes + fixed::kWindows * (window_bytes + result_bytes), kPage)),
        total(staging + members * staging_stride + sizeof(Line)) {}

  std::size_t line(int member, std::uint64_t sequence) const {
    return index(member) * lines_stride + (sequence & (slots - 1)) * sizeof(Line);
  }
  std::size_t progress(int member) const {
    return index(member) * lines_stride + slots * sizeof(Line);
  }
  std::size_t slot(int member, std::uint64_t sequence) const {
    return stage(member) + (sequence & (slots - 1)) * slot_bytes;
  }
  std::size_t window(int member, std::size_t number) const {
    return stage(member) + slots * slot_bytes + number % fixed::kWindows * window_bytes;
  }
  std::size_t result(int member, std::size_t number) const {
    return stage(member) + slots * slot_bytes + fixed::kWindows * window_bytes +
           number % fixed::kWindows * result_bytes;
  }

  std::size_t members;
  std::uint64_t slots;      ///< per member, a power of two; also the number of lines
  std::size_t table_bytes;  ///< at the start of a slot
  std::size_t slot_bytes;   ///< table and payload
  std::size_t window_bytes;
  std::size_t column_bytes;  ///< of a window that carries one slice per member; a multiple of every
                             ///< element size
  std::size_t result_bytes;  ///< one member's share of a window
  std::size_t lines_stride;
  std::size_t staging;
  std::size_t staging_stride;
  std::size_t total;  ///< including room to align the start

 private:
  static constexpr std::size_t kPage = 4096;  // limit: of memory
  constexpr bool wide() const { return members > fixed::kWideGroup; }
  static constexpr std::size_t index(int member) { return static_cast<std::size_t>(member); }
  std::size_t stage(int member) const { return staging + index(member) * staging_stride; }
};

/// The part of `length` elements that `member` of `members` reduces. Parts are in order; all but
/// the last nonempty one are equal and a multiple of `grain`.
struct Share {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool empty() const { return begin == end; }
  std::size_t count() const { return end - begin; }
};
constexpr Share share_of(std::size_t length, std::size_t members, std::size_t member,
                         std::size_t grain) {
  const std::size_t part = align_up((length + members - 1) / members, grain);
  const std::size_t begin = part * member < length ? part * member : length;
  return {begin, length - begin < part ? length : begin + part};
}

}  // namespace muster::shm
