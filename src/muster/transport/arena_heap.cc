#include "muster/transport/arena_heap.h"

#include <algorithm>
#include <array>
#include <bit>

namespace muster::transport {
namespace {

constexpr std::size_t kSpan = 64 * 1024;

constexpr std::size_t up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// 64, 128, ... 1024 in steps of 64, then four to each doubling up to 32 KiB.
constexpr std::size_t kFineClasses = 1024 / ArenaHeap::kAlignment;
constexpr std::size_t kClasses = kFineClasses + 4 * 5;

constexpr std::size_t class_of(std::size_t bytes) {
  if (bytes <= 1024) return bytes == 0 ? 0 : (bytes - 1) / ArenaHeap::kAlignment;
  const std::size_t doubling = std::bit_width(bytes - 1) - 1;  // 2^doubling < bytes <= 2^(doubling + 1)
  const std::size_t quarter = std::size_t{1} << (doubling - 2);
  return kFineClasses + (doubling - 10) * 4 + (bytes - (std::size_t{1} << doubling) - 1) / quarter;
}

constexpr std::size_t bytes_of_class(std::size_t size_class) {
  if (size_class < kFineClasses) return (size_class + 1) * ArenaHeap::kAlignment;
  const std::size_t doubling = 10 + (size_class - kFineClasses) / 4;
  return (std::size_t{1} << doubling) + ((size_class - kFineClasses) % 4 + 1) * (std::size_t{1} << (doubling - 2));
}
static_assert(class_of(1024) == kFineClasses - 1 && class_of(1025) == kFineClasses && class_of(ArenaHeap::kSmall) == kClasses - 1);
static_assert(bytes_of_class(kClasses - 1) == ArenaHeap::kSmall && bytes_of_class(kFineClasses) == 1280);

}  // namespace

std::optional<std::uint64_t> ArenaHeap::allocate(std::size_t bytes) {
  if (bytes > limit_) return std::nullopt;
  if (bytes <= kSmall) return allocate_small(bytes);
  const std::size_t rounded = up(bytes, kPage);
  const auto offset = allocate_pages(rounded);
  if (!offset) return std::nullopt;
  large_.emplace(*offset, rounded);
  in_use_ += rounded;
  return offset;
}

std::optional<std::uint64_t> ArenaHeap::allocate_small(std::size_t bytes) {
  if (small_free_.empty()) small_free_.resize(kClasses);
  const std::size_t size_class = class_of(bytes);
  const std::size_t block = bytes_of_class(size_class);
  auto& list = small_free_[size_class];
  if (list.empty()) {
    const auto span = allocate_pages(kSpan);
    if (!span) return std::nullopt;
    const std::size_t first_page = *span / kPage;
    if (page_class_.size() < first_page + kSpan / kPage) page_class_.resize(first_page + kSpan / kPage);
    std::fill_n(page_class_.begin() + static_cast<std::ptrdiff_t>(first_page), kSpan / kPage, static_cast<std::uint8_t>(size_class + 1));
    for (std::size_t at = kSpan / block; at-- > 0;) list.push_back(*span + at * block);
  }
  const std::uint64_t offset = list.back();
  list.pop_back();
  in_use_ += block;
  return offset;
}

std::optional<std::uint64_t> ArenaHeap::allocate_pages(std::size_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) {
    if (bytes > limit_ - end_) return std::nullopt;
    const std::uint64_t offset = end_;
    end_ += bytes;
    return offset;
  }
  const auto at = free_.find(fit->second);
  const std::uint64_t offset = at->first;
  const FreeBlock block = at->second;
  erase_free(at);
  if (block.bytes > bytes) {
    // Which of its pages are there is not known exactly: the part that is used first is taken for the one that has them.
    const std::size_t rest = block.bytes - bytes;
    insert_free(offset + bytes, {rest, block.dirty > bytes ? std::min(rest, block.dirty - bytes) : 0});
  }
  return offset;
}

bool ArenaHeap::free(std::uint64_t offset, std::vector<Range>& punch) {
  const std::size_t page = offset / kPage;
  if (page < page_class_.size() && page_class_[page] != 0) {
    const std::size_t size_class = page_class_[page] - 1u;
    small_free_[size_class].push_back(offset);
    in_use_ -= bytes_of_class(size_class);
    return true;
  }
  const auto used = large_.find(offset);
  if (used == large_.end()) return false;
  const std::size_t bytes = used->second;
  large_.erase(used);
  in_use_ -= bytes;
  free_pages(offset, bytes);
  if (dirty_ > keep_) pick_for_punching(punch);
  return true;
}

void ArenaHeap::free_pages(std::uint64_t offset, std::size_t bytes) {
  FreeBlock block{bytes, bytes};
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    block.bytes += next->second.bytes;
    block.dirty += next->second.dirty;
    next = erase_free(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == offset) {
      offset = before->first;
      block.bytes += before->second.bytes;
      block.dirty += before->second.dirty;
      erase_free(before);
    }
  }
  insert_free(offset, block);
}

void ArenaHeap::insert_free(std::uint64_t offset, FreeBlock block) {
  free_.emplace(offset, block);
  by_size_.emplace(block.bytes, offset);
  dirty_ += block.dirty;
}

ArenaHeap::FreeMap::iterator ArenaHeap::erase_free(FreeMap::iterator at) {
  by_size_.erase({at->second.bytes, at->first});
  dirty_ -= at->second.dirty;
  return free_.erase(at);
}

void ArenaHeap::pick_for_punching(std::vector<Range>& punch) {
  for (auto largest = by_size_.rbegin(); largest != by_size_.rend() && dirty_ > keep_; ++largest) {
    FreeBlock& block = free_.find(largest->second)->second;
    if (block.dirty == 0) continue;
    punch.push_back({largest->second, block.bytes});
    dirty_ -= block.dirty;
    block.dirty = 0;
  }
}

}  // namespace muster::transport
