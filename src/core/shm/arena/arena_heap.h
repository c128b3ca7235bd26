// SPDX-License-Identifier: BSD-3-Clause
/// Allocation state of an arena: bookkeeping over offsets, stored outside the memory that it
/// describes, because peers can write to that memory.
///
/// Small blocks (up to 8 KiB) come in size classes cut from spans; larger blocks are whole pages.
/// Free pages are either warm (committed) or cold (not committed, or returned to the system).
/// Adjacent ranges of one kind are merged. Allocation takes the best fit among warm ranges, then
/// among cold ones. Freed blocks of up to 1 MiB first go to free lists by size, since the next
/// request is often the same. When more memory is warm than `keep` allows, the ends of the largest
/// warm ranges are returned for punching. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace muster::shm {

/// Free ranges of an arena, all of one kind; adjacent ranges are merged.
class FreePages {
 public:
  struct Range {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };
  std::size_t bytes() const { return bytes_; }
  bool empty() const { return at_.empty(); }
  void insert(Range range);
  /// Cuts `bytes` off the start of the smallest range that is large enough.
  std::optional<std::uint64_t> take(std::size_t bytes);
  /// Cuts up to `bytes` off the end of the largest range.
  Range cut_end_of_largest(std::size_t bytes);
  /// Removes and returns the range that ends at `end`.
  std::optional<Range> remove_before(std::uint64_t end);

 private:
  using Map = std::map<std::uint64_t, std::size_t>;
  Map::iterator add(Range range);
  Map::iterator remove(Map::iterator at);
  // The same ranges twice, by offset and by size. No two of them touch: `insert` merges them.
  Map at_;
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;
  std::size_t bytes_ = 0;
};

class ArenaHeap {
 public:
  static constexpr std::size_t kAlignment = 64;    // limit: a cache line
  static constexpr std::size_t kPage = 4096;       // limit: of memory
  static constexpr std::size_t kSmall = 8 * 1024;  // limit: two pages
  using Range = FreePages::Range;

  /// An allocated block. If `cold` is not empty, the caller must commit those pages and call
  /// `warmed` or `refused` before anything else is done with the block.
  struct Allocation {
    std::uint64_t offset = 0;
    Range cold;
  };

  /// `space`: bytes of the arena. `limit`: maximum committed bytes. `keep`: maximum committed bytes
  /// that are free.
  ArenaHeap(std::size_t space, std::size_t limit, std::size_t keep)
      : space_(space), limit_(limit), keep_(keep) {}

  /// Nothing if no room is left. Punching all kept memory may make room.
  std::optional<Allocation> allocate(std::size_t bytes);
  void warmed(const Allocation& block);
  void refused(const Allocation& block);
  /// Returns false if no block begins at `offset`. Appends to `punch` the ranges to return to the
  /// system; they belong to no one until `punched` is called.
  bool free(std::uint64_t offset, std::vector<Range>& punch);
  /// Size of the block in use that begins at `offset`; 0 if there is none.
  std::size_t bytes_at(std::uint64_t offset) const;
  /// The multi-page block in use that contains `offset`; empty if there is none.
  Range pages_around(std::uint64_t offset) const;
  /// Appends everything that is kept.
  void trim(std::vector<Range>& punch) { shrink_to(0, punch); }
  void punched(const Range& range);

  /// Applies to later allocations.
  void set_limits(std::size_t limit, std::size_t keep);
  std::size_t limit() const { return limit_; }
  std::uint64_t end() const { return end_; }  ///< everything above is free
  std::size_t bytes_in_use() const { return in_use_; }
  std::size_t bytes_kept() const { return warm_.bytes() + quick_bytes_; }

 private:
  struct Pages {
    std::uint64_t offset;
    bool cold;
  };
  std::optional<Allocation> allocate_small(std::size_t bytes);
  std::optional<Pages> take_pages(std::size_t bytes);
  std::optional<Pages> take_cold(std::size_t bytes);
  void list_rest_of_span(std::uint64_t span, std::uint64_t allocated);
  void flush_quick();
  void shrink_to(std::size_t bytes, std::vector<Range>& punch);
  void add_cold(const Range& range);
  std::uint32_t& page(std::uint64_t offset);

  // Each page below `end_` belongs to one of: a block or span in use (`pages_`), `quick_`, `warm_`,
  // `cold_`, or the caller that punches it. All but the cold ones count against `limit_`.
  std::size_t space_;
  std::size_t limit_;
  std::size_t keep_;
  std::uint64_t end_ = 0;  // everything above is cold
  std::size_t in_use_ = 0;
  std::size_t in_spans_ = 0;  // pages of spans; they stay warm
  std::size_t in_blocks_ = 0;
  std::size_t punching_ = 0;  // returned for punching, not punched yet
  FreePages warm_;
  FreePages cold_;
  // One entry per page: 0, the page count of the block in use that begins here, or kSpanPage + the
  // size class of the span that contains it.
  std::vector<std::uint32_t> pages_;
  std::vector<std::vector<std::uint64_t>> small_free_;  // by class
  std::vector<std::vector<std::uint64_t>> quick_;       // freed blocks by page count
  std::size_t quick_bytes_ = 0;
};

/// A small set of disjoint ranges of an arena. Not thread-safe.
class PageRanges {
 public:
  using Range = FreePages::Range;

  bool empty() const { return ends_.empty(); }
  /// `range` must not overlap any other.
  void insert(const Range& range) {
    if (range.bytes > 0) ends_.emplace(range.offset, range.offset + range.bytes);
  }
  void erase(const Range& range) { ends_.erase(range.offset); }
  /// Removes and returns the ranges inside `block`.
  std::vector<Range> remove_within(const Range& block) {
    std::vector<Range> taken;
    const auto first = ends_.lower_bound(block.offset);
    auto last = first;
    for (; last != ends_.end() && last->second <= block.offset + block.bytes; ++last)
      taken.push_back({last->first, static_cast<std::size_t>(last->second - last->first)});
    ends_.erase(first, last);
    return taken;
  }
  bool touches(const Range& range) const {
    std::size_t free = 0;
    each_gap(range, [&](const Range& gap) { free += gap.bytes; });
    return free < range.bytes;
  }
  /// Calls visit(Range) for each part of `range` that no stored range covers, in order.
  template <class Visit>
  void each_gap(const Range& range, Visit visit) const {
    std::uint64_t at = range.offset;
    const std::uint64_t end = range.offset + range.bytes;
    auto next = ends_.upper_bound(at);
    if (next != ends_.begin()) at = std::max(at, std::prev(next)->second);
    for (; at < end; ++next) {
      const bool none = next == ends_.end() || next->first >= end;
      const std::uint64_t until = none ? end : next->first;
      if (until > at) visit(Range{at, static_cast<std::size_t>(until - at)});
      if (none) return;
      at = next->second;
    }
  }

 private:
  std::map<std::uint64_t, std::uint64_t> ends_;  // by begin
};

}  // namespace muster::shm
