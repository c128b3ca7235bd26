// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/shm/arena/quarantine.h"

namespace muster::shm {
namespace {

/// A holder of memory until released.
struct Holder {
  std::shared_ptr<bool> holds = std::make_shared<bool>(true);
  Quarantine::Held held() const {
    return [holds = holds] { return *holds; };
  }
};

// spec: D7 memory that a stopped peer may still write to gets no other use until that peer has
// given it up
TEST(Quarantine, KeepsABlockWhileAnyPartIsHeld) {
  Quarantine quarantine;
  const Holder first, second;
  quarantine.add({100, 50}, first.held());
  quarantine.add({140, 60}, second.held());
  EXPECT_FALSE(quarantine.keep({0, 100}));
  EXPECT_FALSE(quarantine.keep({200, 100}));
  EXPECT_TRUE(quarantine.keep({96, 64}));
  EXPECT_EQ(quarantine.bytes(), 64u);
  EXPECT_TRUE(quarantine.sweep().blocks.empty());
  *first.holds = false;
  const auto over = quarantine.sweep();
  EXPECT_TRUE(over.blocks.empty()) << "its end is held still";
  EXPECT_EQ(over.held.size(), 1u);
  *second.holds = false;
  EXPECT_EQ(quarantine.sweep().blocks, std::vector<std::uint64_t>{96});
  EXPECT_EQ(quarantine.bytes(), 0u);
  EXPECT_TRUE(quarantine.empty());
  EXPECT_TRUE(quarantine.sweep().blocks.empty()) << "blocks are given once";
}

TEST(Quarantine, MemoryReleasedBeforeItIsFreedIsNotKept) {
  Quarantine quarantine;
  const Holder holder;
  quarantine.add({4096, 8192}, holder.held());
  *holder.holds = false;
  quarantine.sweep();
  EXPECT_FALSE(quarantine.keep({4096, 8192}));
}

// Compared with a plain list: random ranges, blocks, and holders that release in any order.
TEST(Quarantine, MatchesAPlainList) {
  struct Range {
    std::uint64_t begin, end;
    Holder holder;
  };
  Quarantine quarantine;
  std::vector<Range> ranges;
  std::map<std::uint64_t, std::uint64_t> kept;  // begin to end
  std::mt19937_64 random(7);
  const auto held = [&](std::uint64_t begin, std::uint64_t end) {
    for (const Range& range : ranges) {
      if (range.begin < end && begin < range.end) return true;
    }
    return false;
  };
  for (int round = 0; round < 5000; ++round) {
    const std::uint64_t begin = random() % 1000, end = begin + 1 + random() % 50;
    switch (random() % 4) {
      case 0:
        ranges.push_back({begin, end, {}});
        quarantine.add({begin, end - begin}, ranges.back().holder.held());
        break;
      case 1: {
        if (kept.contains(begin)) break;
        const bool keeps = quarantine.keep({begin, end - begin});
        ASSERT_EQ(keeps, held(begin, end));
        if (keeps) kept.emplace(begin, end);
        break;
      }
      default: {
        if (ranges.empty()) break;
        const std::size_t at = random() % ranges.size();
        *ranges[at].holder.holds = false;
        ranges.erase(ranges.begin() + static_cast<std::ptrdiff_t>(at));
        std::size_t released = 0;
        for (const std::uint64_t block : quarantine.sweep().blocks) {
          ASSERT_TRUE(kept.contains(block));
          ASSERT_FALSE(held(block, kept[block]));
          kept.erase(block);
          ++released;
        }
        std::size_t bytes = 0;
        for (const auto& [from, to] : kept) {
          ASSERT_TRUE(held(from, to)) << "nobody holds it any more";
          bytes += to - from;
        }
        ASSERT_EQ(quarantine.bytes(), bytes) << released;
      }
    }
  }
}

}  // namespace
}  // namespace muster::shm
