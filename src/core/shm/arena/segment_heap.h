// SPDX-License-Identifier: BSD-3-Clause
/// The heap of a host region. Processes share it, and any of them may die at any instruction; it is
/// lock-free, so none can die holding a lock.
///
/// Block sizes are powers of two of a unit. The free blocks of a size class form a Treiber stack,
/// whose head has a counter against ABA. When a stack is empty, the end of the heap moves up; at
/// the limit, larger blocks are split. A rank that dies between claiming a block and publishing its
/// offset loses that block and nothing else. Free blocks are zero: `release` returns their pages to
/// the system before any rank can claim them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/shm/region_layout.h"
#include "muster/status.h"

namespace muster::shm {

inline constexpr std::size_t kSegmentUnit = 4096;  // limit: a page

class SegmentHeap {
 public:
  /// `entries` has one zeroed entry per unit of `memory`.
  SegmentHeap(RegionHeader& header, SegmentEntry* entries, std::byte* memory, std::size_t units)
      : header_(header), entries_(entries), memory_(memory), units_(units) {}

  /// Returns the offset within the heap.
  Result<std::uint64_t> claim(std::size_t bytes);
  /// Returns false and does nothing if no block in use begins at `offset`.
  bool release(std::uint64_t offset);

 private:
  bool pop(int size_class, std::uint32_t& unit);
  void push(int size_class, std::uint32_t unit);
  bool extend(int size_class, std::uint32_t& unit);
  bool split(int size_class, std::uint32_t& unit);

  RegionHeader& header_;
  SegmentEntry* entries_;
  std::byte* memory_;
  std::size_t units_;
};

/// Zeroes [memory, memory + bytes). Returns whole pages to the system where possible. Works for
/// shared and private mappings and for unaligned ends.
void discard_pages(std::byte* memory, std::size_t bytes);

}  // namespace muster::shm
