// SPDX-License-Identifier: BSD-3-Clause
/// One member's view of its group's segment: addresses of lines, counters and buffers, the current
/// call, and which members have aborted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/shm/segment_layout.h"

namespace muster::shm {

/// Not thread-safe. Other members see only what it stores in the segment.
class GroupSegment {
 public:
  /// `segment`: `SegmentLayout::total` bytes, zeroed before any member sees them.
  GroupSegment(std::byte* segment, int size, int rank)
      : layout_(size), base_(aligned(segment)), rank_(rank) {}
  GroupSegment(const GroupSegment&) = delete;
  GroupSegment& operator=(const GroupSegment&) = delete;

  int size() const { return static_cast<int>(layout_.members); }
  int rank() const { return rank_; }
  const SegmentLayout& layout() const { return layout_; }

  /// Sequence number of the current call, or of the last one. 0: no call yet.
  std::uint64_t sequence() const { return sequence_; }
  void set_sequence(std::uint64_t sequence) { sequence_ = sequence; }
  /// Position of a step of the current call, and of its end.
  Position at_step(std::uint64_t step) const { return position(sequence_, step); }
  Position at_end() const { return end_of(sequence_); }

  Line& line(int member, std::uint64_t sequence) const {
    return *reinterpret_cast<Line*>(base_ + layout_.line(member, sequence));
  }
  Line& line(int member) const { return line(member, sequence_); }
  Line& my_line() const { return line(rank_, sequence_); }
  /// Whether a member has published its line of the current call.
  bool has_begun(int member) const {
    return line(member).sequence.load(std::memory_order_acquire) == sequence_;
  }

  std::byte* slot(int member, std::uint64_t sequence) const {
    return base_ + layout_.slot(member, sequence);
  }
  std::byte* slot(int member) const { return slot(member, sequence_); }
  /// The table at the start of that slot, one slice per member.
  ReaderSlice* table(int member) const { return reinterpret_cast<ReaderSlice*>(slot(member)); }
  std::byte* window(int member, std::size_t number) const {
    return base_ + layout_.window(member, number);
  }
  std::byte* result(int member, std::size_t number) const {
    return base_ + layout_.result(member, number);
  }

  MemberProgress& progress(int member) const {
    return *reinterpret_cast<MemberProgress*>(base_ + layout_.progress(member));
  }
  // The two pair: a peer that reads a position sees all that the member did before it got there.
  Position counter(int member, Counter counter) const {
    return progress(member).counters[static_cast<int>(counter)].load(std::memory_order_acquire);
  }
  void advance(Counter counter, Position position) {
    progress(rank_).counters[static_cast<int>(counter)].store(position, std::memory_order_release);
  }

  /// Whether a peer has aborted the current call or an earlier one.
  bool peer_aborted() const;
  /// Publishes that this member aborts the current call. False if it has aborted one before.
  bool mark_aborted();

  /// Publishes that this member no longer uses the segment, and that neither do `ended`, members
  /// whose processes have ended. Call once; the segment must not be used afterwards. Returns true
  /// on one member: all have left, and the segment can be freed.
  bool leave(std::span<const int> ended);

 private:
  static std::byte* aligned(std::byte* memory) {
    return reinterpret_cast<std::byte*>(
        align_up(reinterpret_cast<std::uintptr_t>(memory), alignof(Line)));
  }

  const SegmentLayout layout_;
  std::byte* const base_;
  const int rank_;
  std::uint64_t sequence_ = 0;
};

/// The last use of a buffer. The buffer is free once `counter` of every peer, or of `reader`, has
/// reached `until`.
struct BufferUse {
  Position until = 0;
  Counter counter = Counter::drained;
  int reader = -1;  ///< the only reader; -1: all peers
  bool pending = false;
};

/// A member's windows or result buffers: which one is next, and which peers may still read each.
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
