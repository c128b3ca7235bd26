// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/segment_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

namespace muster::shm {
namespace {

// Head of a stack: an ABA counter in the upper half, 1 + the unit of the first block in the lower.
constexpr std::uint64_t head_of(std::uint64_t old, std::uint32_t first) {
  return (((old >> 32) + 1) << 32) | first;
}
constexpr std::uint32_t first_of(std::uint64_t head) { return static_cast<std::uint32_t>(head); }

}  // namespace

bool SegmentHeap::pop(int size_class, std::uint32_t& unit) {
  auto& stack = header_.free_blocks[size_class];
  std::uint64_t head = stack.load(std::memory_order_acquire);
  while (first_of(head) != 0) {
    const std::uint32_t candidate = first_of(head) - 1;
    if (candidate >= units_) return false;  // only a stray write by a peer can cause this
    // Another rank may pop the block and relink it during this read. The counter in the head then
    // makes the exchange fail.
    const std::uint32_t next = entries_[candidate].next.load(std::memory_order_relaxed);
    if (stack.compare_exchange_weak(head, head_of(head, next), std::memory_order_acq_rel,
                                    std::memory_order_acquire)) {
      unit = candidate;
      return true;
    }
  }
  return false;
}

void SegmentHeap::push(int size_class, std::uint32_t unit) {
  auto& stack = header_.free_blocks[size_class];
  std::uint64_t head = stack.load(std::memory_order_relaxed);
  do {
    entries_[unit].next.store(first_of(head), std::memory_order_relaxed);
  } while (!stack.compare_exchange_weak(head, head_of(head, unit + 1), std::memory_order_release,
                                        std::memory_order_relaxed));
}

bool SegmentHeap::extend(int size_class, std::uint32_t& unit) {
  const std::uint64_t wanted = std::uint64_t{1} << size_class;
  std::uint64_t end = header_.heap_end.load(std::memory_order_relaxed);
  do {
    if (end > units_ || wanted > units_ - end) return false;
  } while (!header_.heap_end.compare_exchange_weak(end, end + wanted, std::memory_order_relaxed));
  unit = static_cast<std::uint32_t>(end);
  return true;
}

bool SegmentHeap::split(int size_class, std::uint32_t& unit) {
  for (int larger = size_class + 1; larger < kSegmentClasses; ++larger) {
    if (!pop(larger, unit)) continue;
    for (int half = larger - 1; half >= size_class; --half)
      push(half, unit + (std::uint32_t{1} << half));
    return true;
  }
  return false;
}

Result<std::uint64_t> SegmentHeap::claim(std::size_t bytes) {
  const std::size_t wanted =
      bytes / kSegmentUnit + (bytes % kSegmentUnit != 0 || bytes == 0 ? 1 : 0);
  const int size_class = static_cast<int>(std::bit_width(wanted - 1));
  std::uint32_t unit = 0;
  if (wanted > units_ || size_class >= kSegmentClasses ||
      (!pop(size_class, unit) && !extend(size_class, unit) && !split(size_class, unit) &&
       !pop(size_class, unit))) {
    return Status(
        Code::exhausted,
        "the host region has no room for a segment of " + std::to_string(bytes) +
            " bytes (its heap has " + std::to_string(units_ * kSegmentUnit) +
            " in all, in blocks of powers of two): close groups that are no longer needed");
  }
  // Relaxed: no rank looks at it before it has learned the offset from this one, in a message.
  entries_[unit].state.store(static_cast<std::uint32_t>(size_class) + 1, std::memory_order_relaxed);
  return std::uint64_t{unit} * kSegmentUnit;
}

bool SegmentHeap::release(std::uint64_t offset) {
  if (offset % kSegmentUnit != 0 || offset / kSegmentUnit >= units_) return false;
  const auto unit = static_cast<std::uint32_t>(offset / kSegmentUnit);
  // The exchange makes a second release of the same block do nothing.
  const std::uint32_t state = entries_[unit].state.exchange(0, std::memory_order_acq_rel);
  if (state == 0 || state > kSegmentClasses) return false;
  const int size_class = static_cast<int>(state) - 1;
  // Zeroed before it is pushed, whose release pairs with the acquire of `pop`: the next owner sees
  // zeroes. A rank that dies in between loses the block.
  discard_pages(memory_ + offset, kSegmentUnit << size_class);
  push(size_class, unit);
  return true;
}

void discard_pages(std::byte* memory, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t ahead = std::min(bytes, (page - address % page) % page);
  const std::size_t whole = (bytes - ahead) / page * page;
  std::memset(memory, 0, ahead);
  std::memset(memory + ahead + whole, 0, bytes - ahead - whole);
  if (whole == 0) return;
  std::byte* const inner = memory + ahead;
  if (::madvise(inner, whole, MADV_REMOVE) == 0) return;
  // Not a shared file mapping: then private memory, which reads as zero after MADV_DONTNEED.
  const bool is_private = errno == EINVAL || errno == EACCES;
  if (is_private && ::madvise(inner, whole, MADV_DONTNEED) == 0) return;
  std::memset(inner, 0, whole);
}

}  // namespace muster::shm
