// SPDX-License-Identifier: BSD-3-Clause
// Any rank count and way of dividing writes, any other reads: every bit is the same.

#include <algorithm>
#include <filesystem>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/testing/states.h"
#include "testing/budget.h"

namespace muster::shards {
namespace {

using namespace shards::testing;

struct Layout {
  Way way;
  int ranks;
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const Way way : kWays)
    for (const int ranks : kRanks) all.push_back({way, ranks});
  return all;
}

// spec: S2.ranks any number of ranks, mesh or wrapping: {1,2,3,4,6,8} ranks x {plain, DDP, ZeRO,
// FSDP, mesh of two dimensions}, bit for bit
TEST(Resharding, AnyLayoutReadsWhatAnyOtherWrote) {
  const TemporaryFolder folder("muster-shards-");
  std::mt19937_64 random(muster::testing::test_seed());
  const auto all = layouts();
  // Each layout writes once; 500 seeded pairs of 900, or all of them.
  auto pairs_left = static_cast<std::size_t>(muster::testing::test_rounds(500, 900));
  for (std::size_t w = 0; w < all.size(); ++w) {
    const std::string path = folder.path() + "/checkpoint";
    save_as(all[w].way, all[w].ranks, {.path = path, .step = {}, .durable = false});
    const auto index = open_index(path);
    ASSERT_TRUE(index.ok()) << index.status().message();
    EXPECT_EQ(index->world_size, all[w].ranks);
    auto readers = all;
    std::shuffle(readers.begin(), readers.end(), random);
    const std::size_t share = pairs_left / (all.size() - w);
    pairs_left -= share;
    for (std::size_t r = 0; r < std::min(share, readers.size()); ++r)
      EXPECT_EQ(wrong_when_loaded(*index, readers[r].way, readers[r].ranks), 0)
          << "written by way " << static_cast<int>(all[w].way) << " of " << all[w].ranks
          << ", read by way " << static_cast<int>(readers[r].way) << " of " << readers[r].ranks;
    EXPECT_EQ(verify(*index), std::vector<std::string>());
  }
}

// spec: S2.bytes a rank reads only what it needs: the blocks with its bytes, which S9 are verified
// whole
TEST(Resharding, ARankReadsOnlyItsBytes) {
  const TemporaryFolder folder("muster-shards-");
  const Extent sizes{640, 4096};  // 10 blocks of 64 rows
  const std::vector<std::byte> memory(640 * 4096 * 4, std::byte{7});
  const CommitOptions options{.path = folder.path() + "/c", .step = {}, .durable = false};
  const Shard whole{"w", "F32", sizes, {box_of(sizes)}};
  ASSERT_TRUE(save({whole}, {memory.data()}, "{}", options, {}).ok());
  const auto index = open_index(options.path);
  ASSERT_TRUE(index.ok());
  const std::pair<Box, int> wanted[] = {{{{16, 0}, {16, 4096}}, 1},
                                        {{{64, 0}, {128, 4096}}, 2},
                                        {{{100, 0}, {64, 4096}}, 2},
                                        {{{0, 1024}, {640, 1024}}, 10}};
  for (const auto& [box, blocks] : wanted) {
    Reader reader(*index);
    std::vector<std::byte> part(static_cast<std::size_t>(box.elements()) * 4);
    ASSERT_TRUE(reader.read({"w", "F32", sizes, {box}}, part).ok());
    EXPECT_EQ(reader.bytes_read(), static_cast<std::size_t>(blocks) * kDigestBlock);
    EXPECT_EQ(part, std::vector<std::byte>(part.size(), std::byte{7}));
  }
}

// spec: S1 what is to be loaded and is not there, or is another, is named
TEST(Resharding, WhatDoesNotFitIsNamed) {
  const TemporaryFolder folder("muster-shards-");
  const CommitOptions options{.path = folder.path() + "/c", .step = {}, .durable = false};
  save_as(Way::plain, 1, options);
  const auto index = open_index(options.path);
  ASSERT_TRUE(index.ok());
  Reader reader(*index);
  std::vector<std::byte> bytes(1000);
  const auto message = [&](const Shard& shard) { return reader.read(shard, bytes).message(); };
  EXPECT_NE(message({"model.lost", "F32", {}, {}}).find("'model.lost'"), std::string::npos);
  EXPECT_NE(message({"model.norm.bias", "F32", {8}, {}}).find("F32 [7]"), std::string::npos);
  EXPECT_NE(message({"model.norm.bias", "F16", {7}, {}}).find("F16 [7]"), std::string::npos);
}

}  // namespace
}  // namespace muster::shards
