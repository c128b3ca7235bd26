// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/piece_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace muster::elastic {
namespace {

ReachablePart part(CommitId id, int rank, int world_size, bool agreed = false) {
  return {id, 0, 0, rank, world_size, agreed ? 1 : 0};
}

// spec: L7 the commit that is restored is the newest of which all parts are there; one that some
// rank took for made is never given up for an older one
TEST(NewestWhole, IsTheNewestThatAllPartsAreOf) {
  const CommitId old{1, 7}, next{1, 8}, again{2, 7};
  std::vector<ReachablePart> parts;
  EXPECT_FALSE(newest_whole(parts)->has_value());
  parts = {part(old, 0, 2, true), part(old, 1, 2), part(next, 0, 2)};
  EXPECT_EQ(**newest_whole(parts), old);
  parts.push_back(part(next, 1, 2));
  EXPECT_EQ(**newest_whole(parts), next);
  parts.push_back(part(again, 0, 1));  // an epoch with fewer ranks
  EXPECT_EQ(**newest_whole(parts), again);
  parts = {part(old, 0, 2, true), part(old, 1, 2, true), part(next, 1, 2, true)};
  const auto lost = newest_whole(parts);
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.status().code(), Code::exhausted);
  EXPECT_NE(lost.status().message().find("commit 8 is lost: what rank 0 of 2 had"),
            std::string::npos)
      << lost.status().message();
  parts = {part({1, 1}, 0, 2)};  // a death during the first commit of the job
  EXPECT_FALSE(newest_whole(parts)->has_value());
}

// spec: L7 a rank's partner is on the next node
TEST(Partners, AreOnTheNextNode) {
  const auto partners = [](std::vector<std::int64_t> nodes) { return partners_of(nodes); };
  EXPECT_EQ(partners({0, 0, 0}), (std::vector{-1, -1, -1}));
  EXPECT_EQ(partners({0, 0, 1, 1}), (std::vector{2, 3, 0, 1}));
  EXPECT_EQ(partners({0, 1, 1, 1, 4}), (std::vector{1, 4, 4, 4, 0}));
}

// spec: L7 what two ranks had as stretches, three get as others; each takes from itself what it has
TEST(PieceMap, PiecesGoToOtherDivisions) {
  const shards::Extent sizes{4, 3};
  const auto stretch = [&](std::int64_t first, std::int64_t count) {
    return shards::Shard{"w", "F32", sizes, shards::boxes_of_stretch(sizes, first, count)};
  };
  const shards::Shard both{"step", "F32", {}, {shards::box_of({})}};
  const std::vector<PieceSource> sources{{0, 5, {both, stretch(0, 6)}},
                                         {1, 6, {both, stretch(6, 6)}}};
  const auto map = PieceMap::of(sources);
  ASSERT_TRUE(map.ok());
  std::vector<int> found(12);
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<shards::Shard> wanted{stretch(4 * rank, 4), both};
    const auto copies = map->copies(wanted, rank);
    ASSERT_TRUE(copies.ok()) << copies.status().message();
    for (const PieceCopy& copy : *copies) {
      EXPECT_EQ(copy.memory, 5 + copy.holder);
      if (copy.wanted == 1) {
        EXPECT_EQ(copy.holder, rank == 2 ? 0 : rank);
        EXPECT_EQ(copy.from, 0U);
        continue;
      }
      // The scalar comes first, and the next tensor begins at a multiple of 64.
      const auto source = (copy.from - 64) / 4 + static_cast<std::uint64_t>(copy.holder) * 6;
      EXPECT_EQ(source, copy.into / 4 + static_cast<std::uint64_t>(rank) * 4);
      for (std::uint64_t i = 0; i < copy.bytes / 4; ++i) ++found[source + i];
    }
  }
  EXPECT_EQ(found, std::vector<int>(12, 1));
  const std::vector<shards::Shard> other{{"w", "F64", sizes, {shards::box_of(sizes)}}};
  EXPECT_FALSE(map->copies(other, 0).ok());
  const std::vector<shards::Shard> absent{{"v", "F32", sizes, {shards::box_of(sizes)}}};
  EXPECT_FALSE(map->copies(absent, 0).ok());
  const auto half = PieceMap::of(std::span(sources).first(1));
  const std::vector<shards::Shard> all{{"w", "F32", sizes, {shards::box_of(sizes)}}};
  EXPECT_FALSE(half->copies(all, 0).ok());
}

}  // namespace
}  // namespace muster::elastic
