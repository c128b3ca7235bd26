// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/arena_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace muster::shm {
namespace {

// Allocates and frees at random, next to a plain map of used bytes and a map of committed pages:
// blocks do not overlap, warm pages are committed, ranges to be punched are unused, limits hold.
TEST(ArenaHeap, BlocksAreAlignedApartAndComeBack) {
  constexpr std::size_t kSpace = std::size_t{1} << 30, kLimit = std::size_t{24} << 20,
                        kKeep = std::size_t{1} << 20;
  ArenaHeap heap(kSpace, kLimit, kKeep);
  std::mt19937_64 random(5);
  std::map<std::uint64_t, std::size_t> used;
  std::vector<bool> warm(kSpace / ArenaHeap::kPage);
  std::size_t warm_pages = 0;
  const auto set_pages = [&](const ArenaHeap::Range& range, bool to) {
    for (std::size_t page = range.offset / ArenaHeap::kPage;
         page < (range.offset + range.bytes) / ArenaHeap::kPage; ++page) {
      EXPECT_NE(warm[page], to) << "page " << page;
      warm[page] = to;
      to ? ++warm_pages : --warm_pages;
    }
  };
  std::vector<ArenaHeap::Range> punch;
  int full = 0, refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    if (random() % 100 < 55) {
      const std::size_t bytes = random() % 3 == 0   ? random() % 500'000
                                : random() % 5 == 0 ? random() % 3'000'000
                                                    : random() % 10'000;
      const auto taken = heap.allocate(bytes);
      if (!taken) {
        ASSERT_GT(heap.bytes_in_use() + heap.bytes_kept() + bytes + (std::size_t{8} << 20), kLimit);
        ++full;
        for (int few = 0; few < 20 && !used.empty(); ++few) {
          ASSERT_TRUE(heap.free(used.begin()->first, punch));
          used.erase(used.begin());
        }
        continue;
      }
      ASSERT_EQ(taken->offset % ArenaHeap::kAlignment, 0u);
      if (taken->cold.bytes > 0 && random() % 10 == 0) {
        heap.refused(*taken);
        ++refused;
        continue;
      }
      set_pages(taken->cold, true);
      if (taken->cold.bytes > 0) heap.warmed(*taken);
      const std::uint64_t last = taken->offset + std::max<std::size_t>(bytes, 1) - 1;
      ASSERT_GE(heap.bytes_at(taken->offset), bytes);
      const auto around = heap.pages_around(last);
      ASSERT_EQ(around.bytes, bytes > ArenaHeap::kSmall ? heap.bytes_at(taken->offset) : 0);
      if (around.bytes > 0) {
        ASSERT_EQ(around.offset, taken->offset);
      }
      for (std::size_t page = taken->offset / ArenaHeap::kPage; page <= last / ArenaHeap::kPage;
           ++page)
        ASSERT_TRUE(warm[page]);
      const auto next = used.lower_bound(taken->offset);
      if (next != used.end()) {
        ASSERT_GE(next->first, taken->offset + bytes);
      }
      if (next != used.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second, taken->offset);
      }
      used.emplace(taken->offset, std::max<std::size_t>(bytes, 1));
      ASSERT_LE(warm_pages * ArenaHeap::kPage, kLimit);
    } else if (!used.empty()) {
      auto at = used.lower_bound(random() % (used.rbegin()->first + 1));
      ASSERT_TRUE(heap.free(at->first, punch));
      used.erase(at);
      ASSERT_LE(heap.bytes_kept(), kKeep);
    }
    // Sometimes earlier ranges are still being punched.
    if (random() % 3 == 0) continue;
    for (const auto& range : punch) {
      const auto inside = used.lower_bound(range.offset);
      if (inside != used.end()) {
        ASSERT_GE(inside->first, range.offset + range.bytes) << "memory in use would be punched";
      }
      set_pages(range, false);
      heap.punched(range);
    }
    punch.clear();
  }
  EXPECT_GT(full, 0);
  EXPECT_GT(refused, 0);
  for (const auto& [offset, bytes] : used) ASSERT_TRUE(heap.free(offset, punch));
  EXPECT_EQ(heap.bytes_in_use(), 0u);
  heap.trim(punch);
  EXPECT_EQ(heap.bytes_kept(), 0u);
}

TEST(ArenaHeap, NeighboursAreMergedAndTheLimitHolds) {
  ArenaHeap heap(std::size_t{1} << 20, std::size_t{1} << 20, 0);
  std::vector<std::uint64_t> quarters;
  std::vector<ArenaHeap::Range> punch;
  for (int i = 0; i < 4; ++i) quarters.push_back(heap.allocate(1 << 18).value().offset);
  EXPECT_FALSE(heap.allocate(40'000));
  EXPECT_FALSE(heap.allocate(SIZE_MAX));
  for (const int i : {0, 2, 3, 1})
    EXPECT_TRUE(heap.free(quarters[static_cast<std::size_t>(i)], punch));
  EXPECT_FALSE(heap.free(quarters[0], punch)) << "given back twice";
  EXPECT_FALSE(heap.allocate(1 << 20)) << "its pages are still being given back";
  for (const auto& range : punch) heap.punched(range);
  EXPECT_EQ(heap.allocate(1 << 20).value().offset, 0u);
}

// Freed memory is reused as it is, without a system call.
TEST(ArenaHeap, FreedBlocksStayWarm) {
  ArenaHeap heap(std::size_t{1} << 30, std::size_t{1} << 30, std::size_t{64} << 20);
  std::vector<ArenaHeap::Range> punch;
  for (const std::size_t bytes :
       {std::size_t{20'000}, std::size_t{1} << 20, std::size_t{40} << 20}) {
    const auto first = heap.allocate(bytes).value();
    EXPECT_GE(first.cold.bytes, bytes);
    heap.warmed(first);
    ASSERT_TRUE(heap.free(first.offset, punch));
    const auto again = heap.allocate(bytes).value();
    EXPECT_EQ(again.offset, first.offset);
    EXPECT_EQ(again.cold.bytes, 0u);
  }
  EXPECT_TRUE(punch.empty());
  const auto large = heap.allocate(std::size_t{100} << 20).value();
  heap.warmed(large);
  ASSERT_TRUE(heap.free(large.offset, punch));
  EXPECT_LE(heap.bytes_kept(), std::size_t{64} << 20);
  EXPECT_GT(heap.bytes_kept(), std::size_t{50} << 20) << "no more than needed is given back";
}

// Compared with a plain set of bytes.
TEST(PageRanges, MatchAPlainSet) {
  PageRanges ranges;
  std::vector<bool> taken(300);
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t begin = random() % 250, bytes = random() % 50;
    bool any = false;
    for (std::size_t at = begin; at < begin + bytes; ++at) any = any || taken[at];
    ASSERT_EQ(ranges.touches({begin, bytes}), any);
    if (random() % 4 == 0) {
      for (const auto& range : ranges.remove_within({begin, bytes})) {
        ASSERT_TRUE(range.offset >= begin && range.offset + range.bytes <= begin + bytes);
        for (std::size_t at = range.offset; at < range.offset + range.bytes; ++at)
          taken[at] = false;
      }
      continue;
    }
    std::vector<bool> gaps(taken.size());
    std::vector<PageRanges::Range> free;
    ranges.each_gap({begin, bytes}, [&](const PageRanges::Range& gap) { free.push_back(gap); });
    for (const auto& gap : free) {
      for (std::size_t at = gap.offset; at < gap.offset + gap.bytes; ++at) gaps[at] = true;
      ranges.insert(gap);
    }
    for (std::size_t at = 0; at < taken.size(); ++at) {
      const bool inside = at >= begin && at < begin + bytes;
      ASSERT_EQ(gaps[at], inside && !taken[at]);
      taken[at] = taken[at] || inside;
    }
    ASSERT_EQ(ranges.empty(), std::none_of(taken.begin(), taken.end(), [](bool is) { return is; }));
  }
}

}  // namespace
}  // namespace muster::shm
