/// The heap of a host region, shared by processes of which any may die at any instruction: no lock,
/// so nobody can die holding one.
///
/// Blocks are powers of two of a unit. Free ones of a class form a stack (Treiber's, its head with
/// a count against ABA); when a stack is empty the end of the heap moves up, and at the very end
/// larger blocks are halved. A rank that dies between taking a block and telling anybody loses that
/// block, no more. What lies in blocks that are free is zero: `release` gives their pages back to
/// the system before anybody can claim them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "muster/base/status.h"
#include "muster/shm/region_layout.h"

namespace muster::shm {

inline constexpr std::size_t kSegmentUnit = 4096;  // limit: a page

class SegmentHeap {
 public:
  /// `entries` has one entry per unit of `memory`, all of it zero at first.
  SegmentHeap(RegionHeader& header, SegmentEntry* entries, std::byte* memory, std::size_t units)
      : header_(header), entries_(entries), memory_(memory), units_(units) {}

  /// Offset within the heap.
  Result<std::uint64_t> claim(std::size_t bytes);
  /// False where `offset` is no block in use (nothing is done then).
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

/// Zeroes [memory, memory + bytes) by giving its whole pages back to the system where that can be
/// done, both for shared mappings and private ones; both ends page aligned or not.
void discard_pages(std::byte* memory, std::size_t bytes);

}  // namespace muster::shm
