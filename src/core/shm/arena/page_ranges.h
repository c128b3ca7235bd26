/// A small set of disjoint ranges of an arena. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include "core/shm/arena/arena_heap.h"

namespace muster::shm {

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
