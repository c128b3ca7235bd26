// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/arena_heap.h"

#include <algorithm>
#include <bit>

#include "core/tunables/tunables_fixed.h"

namespace muster::shm {
namespace {

constexpr std::size_t kSpan = 64 * 1024;  // limit: eight of the largest small blocks
constexpr std::size_t kSpanPages = kSpan / ArenaHeap::kPage;
constexpr std::uint32_t kSpanPage = 0x8000'0000;  // limit: a bit

constexpr std::size_t up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Classes: 64, 128, ... 1024 in steps of 64, then four per doubling up to 8 KiB.
constexpr std::size_t kFineClasses = 1024 / ArenaHeap::kAlignment;  // limit: of a table
constexpr std::size_t kClasses = kFineClasses + 4 * 3;              // limit: of a table

constexpr std::size_t class_of(std::size_t bytes) {
  if (bytes <= kFineClasses * ArenaHeap::kAlignment)
    return bytes == 0 ? 0 : (bytes - 1) / ArenaHeap::kAlignment;
  const std::size_t doubling =
      std::bit_width(bytes - 1) - 1;  // 2^doubling < bytes <= 2^(doubling + 1)
  const std::size_t quarter = std::size_t{1} << (doubling - 2);
  return kFineClasses + (doubling - 10) * 4 + (bytes - (std::size_t{1} << doubling) - 1) / quarter;
}

constexpr std::size_t bytes_of_class(std::size_t size_class) {
  if (size_class < kFineClasses) return (size_class + 1) * ArenaHeap::kAlignment;
  const std::size_t doubling = 10 + (size_class - kFineClasses) / 4;
  return (std::size_t{1} << doubling) +
         ((size_class - kFineClasses) % 4 + 1) * (std::size_t{1} << (doubling - 2));
}
static_assert(class_of(1024) == kFineClasses - 1 && class_of(1025) == kFineClasses &&
              class_of(ArenaHeap::kSmall) == kClasses - 1);
static_assert(bytes_of_class(kClasses - 1) == ArenaHeap::kSmall &&
              bytes_of_class(kFineClasses) == 1280);

}  // namespace

FreePages::Map::iterator FreePages::add(Range range) {
  by_size_.emplace(range.bytes, range.offset);
  bytes_ += range.bytes;
  return at_.emplace(range.offset, range.bytes).first;
}

FreePages::Map::iterator FreePages::remove(Map::iterator at) {
  by_size_.erase({at->second, at->first});
  bytes_ -= at->second;
  return at_.erase(at);
}

void FreePages::insert(Range range) {
  auto next = at_.lower_bound(range.offset);
  if (next != at_.end() && next->first == range.offset + range.bytes) {
    range.bytes += next->second;
    next = remove(next);
  }
  if (auto before = remove_before(range.offset))
    range = {before->offset, before->bytes + range.bytes};
  add(range);
}

std::optional<FreePages::Range> FreePages::remove_before(std::uint64_t end) {
  const auto next = at_.lower_bound(end);
  if (next == at_.begin()) return std::nullopt;
  const auto before = std::prev(next);
  if (before->first + before->second != end) return std::nullopt;
  const Range range{before->first, before->second};
  remove(before);
  return range;
}

std::optional<std::uint64_t> FreePages::take(std::size_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) return std::nullopt;
  const Range range{fit->second, fit->first};
  remove(at_.find(range.offset));
  if (range.bytes > bytes) add({range.offset + bytes, range.bytes - bytes});
  return range.offset;
}

FreePages::Range FreePages::cut_end_of_largest(std::size_t bytes) {
  const auto largest = std::prev(by_size_.end());
  const Range range{largest->second, largest->first};
  remove(at_.find(range.offset));
  if (range.bytes <= bytes) return range;
  add({range.offset, range.bytes - bytes});
  return {range.offset + range.bytes - bytes, bytes};
}

std::uint32_t& ArenaHeap::page(std::uint64_t offset) {
  const std::size_t index = offset / kPage;
  if (index >= pages_.size()) pages_.resize(std::max(index + 1, pages_.size() + pages_.size() / 2));
  return pages_[index];
}

void ArenaHeap::set_limits(std::size_t limit, std::size_t keep) {
  limit_ = limit;
  keep_ = keep;
}

std::optional<ArenaHeap::Allocation> ArenaHeap::allocate(std::size_t bytes) {
  if (bytes > space_) return std::nullopt;
  if (bytes <= kSmall) return allocate_small(bytes);
  const std::size_t rounded = up(bytes, kPage);
  const auto pages = take_pages(rounded);
  if (!pages) return std::nullopt;
  page(pages->offset) = static_cast<std::uint32_t>(rounded / kPage);
  in_use_ += rounded;
  in_blocks_ += rounded;
  return Allocation{pages->offset, {pages->offset, pages->cold ? rounded : 0}};
}

std::optional<ArenaHeap::Allocation> ArenaHeap::allocate_small(std::size_t bytes) {
  if (small_free_.empty()) small_free_.resize(kClasses);
  const std::size_t size_class = class_of(bytes);
  auto& list = small_free_[size_class];
  Allocation allocated;
  if (list.empty()) {
    const auto span = take_pages(kSpan);
    if (!span) return std::nullopt;
    in_spans_ += kSpan;
    for (std::size_t at = 0; at < kSpanPages; ++at)
      page(span->offset + at * kPage) = static_cast<std::uint32_t>(kSpanPage + size_class);
    allocated = {span->offset, {span->offset, span->cold ? kSpan : 0}};
    if (!span->cold) list_rest_of_span(span->offset, allocated.offset);
  } else {
    allocated.offset = list.back();
    list.pop_back();
  }
  in_use_ += bytes_of_class(size_class);
  return allocated;
}

void ArenaHeap::list_rest_of_span(std::uint64_t span, std::uint64_t allocated) {
  const std::size_t size_class = page(span) - kSpanPage;
  const std::size_t block = bytes_of_class(size_class);
  for (std::size_t at = kSpan / block; at-- > 0;) {
    if (span + at * block != allocated) small_free_[size_class].push_back(span + at * block);
  }
}

void ArenaHeap::warmed(const Allocation& block) {
  if ((page(block.cold.offset) & kSpanPage) != 0)
    list_rest_of_span(block.cold.offset, block.offset);
}

void ArenaHeap::refused(const Allocation& block) {
  const std::uint32_t kind = page(block.cold.offset);
  if ((kind & kSpanPage) != 0) {
    in_use_ -= bytes_of_class(kind - kSpanPage);
    in_spans_ -= kSpan;
    for (std::size_t at = 0; at < kSpanPages; ++at) page(block.cold.offset + at * kPage) = 0;
  } else {
    in_use_ -= block.cold.bytes;
    in_blocks_ -= block.cold.bytes;
    page(block.cold.offset) = 0;
  }
  add_cold(block.cold);
}

std::optional<ArenaHeap::Pages> ArenaHeap::take_pages(std::size_t bytes) {
  const std::size_t pages = bytes / kPage;
  if (pages < quick_.size() && !quick_[pages].empty()) {
    const std::uint64_t offset = quick_[pages].back();
    quick_[pages].pop_back();
    quick_bytes_ -= bytes;
    return Pages{offset, false};
  }
  if (const auto offset = warm_.take(bytes)) return Pages{*offset, false};
  if (quick_bytes_ >= bytes) {  // merged, they may suffice
    flush_quick();
    if (const auto offset = warm_.take(bytes)) return Pages{*offset, false};
  }
  return take_cold(bytes);
}

std::optional<ArenaHeap::Pages> ArenaHeap::take_cold(std::size_t bytes) {
  const std::size_t have = in_blocks_ + in_spans_ + bytes_kept() + punching_;
  if (have > limit_ || bytes > limit_ - have) return std::nullopt;
  if (const auto offset = cold_.take(bytes)) return Pages{*offset, true};
  if (bytes > space_ - end_) return std::nullopt;
  const std::uint64_t offset = end_;
  end_ += bytes;
  return Pages{offset, true};
}

bool ArenaHeap::free(std::uint64_t offset, std::vector<Range>& punch) {
  if (offset / kPage >= pages_.size()) return false;
  std::uint32_t& kind = pages_[offset / kPage];
  if ((kind & kSpanPage) != 0) {
    const std::size_t size_class = kind - kSpanPage;
    small_free_[size_class].push_back(offset);
    in_use_ -= bytes_of_class(size_class);
    return true;
  }
  if (kind == 0 || offset % kPage != 0) return false;
  const std::size_t pages = kind;
  const std::size_t bytes = pages * kPage;
  kind = 0;
  in_use_ -= bytes;
  in_blocks_ -= bytes;
  if (pages > fixed::kQuickPages) {
    warm_.insert({offset, bytes});
  } else {
    if (quick_.size() <= pages) quick_.resize(fixed::kQuickPages + 1);
    quick_[pages].push_back(offset);
    quick_bytes_ += bytes;
    if (quick_bytes_ > fixed::kQuickBytes) flush_quick();
  }
  // Shrink to 15/16 of `keep_`, so that not every later free costs a system call.
  if (bytes_kept() > keep_) shrink_to(keep_ - keep_ / 16, punch);
  return true;
}

std::size_t ArenaHeap::bytes_at(std::uint64_t offset) const {
  if (offset / kPage >= pages_.size()) return 0;
  const std::uint32_t kind = pages_[offset / kPage];
  if ((kind & kSpanPage) != 0) return bytes_of_class(kind - kSpanPage);
  return offset % kPage == 0 ? kind * kPage : 0;
}

ArenaHeap::Range ArenaHeap::pages_around(std::uint64_t offset) const {
  if (pages_.empty()) return {offset, 0};
  std::size_t first = std::min<std::size_t>(offset / kPage, pages_.size() - 1);
  while (first > 0 && pages_[first] == 0) --first;
  const std::uint32_t kind = pages_[first];
  if ((kind & kSpanPage) != 0 || offset / kPage - first >= kind) return {offset, 0};
  return {first * kPage, kind * kPage};
}

void ArenaHeap::flush_quick() {
  for (std::size_t pages = 1; pages < quick_.size(); ++pages) {
    for (const std::uint64_t offset : quick_[pages]) warm_.insert({offset, pages * kPage});
    quick_[pages].clear();
  }
  quick_bytes_ = 0;
}

void ArenaHeap::shrink_to(std::size_t bytes, std::vector<Range>& punch) {
  flush_quick();
  while (warm_.bytes() > bytes) {
    punch.push_back(warm_.cut_end_of_largest(up(warm_.bytes() - bytes, kPage)));
    punching_ += punch.back().bytes;
  }
}

void ArenaHeap::punched(const Range& range) {
  punching_ -= range.bytes;
  add_cold(range);
}

void ArenaHeap::add_cold(const Range& range) {
  if (range.offset + range.bytes != end_) return cold_.insert(range);
  end_ = range.offset;
  if (const auto before = cold_.remove_before(end_)) end_ = before->offset;
}

}  // namespace muster::shm
