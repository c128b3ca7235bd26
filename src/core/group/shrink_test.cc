// SPDX-License-Identifier: BSD-3-Clause
// Shrinking groups after real deaths of processes (SIGKILL).
#include <signal.h>

#include <sstream>

#include "core/group/testing/ranks.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

using std::chrono::seconds;
using testing::RankProcesses;
using testing::SharedCounter;

constexpr auto kShrinkLimit = seconds(180);
constexpr int kRanks = 5;

/// Reduces in a loop and shrinks on failure; ends once `left` ranks have completed rounds together.
/// Returns "rank/size sum".
std::string survive(int rank, const std::string& meeting, int left, SharedCounter& rounds) {
  init_process_group({.backend = "native",
                      .init_method = "file://" + meeting,
                      .timeout = kShrinkLimit,
                      .world_size = kRanks,
                      .rank = rank});
  for (int good = 0; get_world_size() > left || good < 20;) {
    auto tensor = torch::full({1000}, 1 << rank, at::kInt);
    try {
      all_reduce(tensor);
      ++good;
      rounds.add(1);
    } catch (const DistError&) {
      good = 0;
      shrink_group();
    }
  }
  auto sum = torch::full({1}, 1 << rank, at::kInt);
  all_reduce(sum);
  const auto pair = new_group({.ranks = std::vector<int>{0, 1}});
  if (pair->is_member()) barrier({.group = pair});
  std::ostringstream said;
  said << get_rank() << "/" << get_world_size() << " " << sum.item<int>();
  destroy_process_group();
  return said.str();
}

/// Kills the sets of victims one after another, each once the survivors of the previous one work
/// again.
void play(const std::vector<std::vector<int>>& waves) {
  const testing::ScratchFolder scratch;
  SharedCounter rounds;
  std::vector<int> alive{0, 1, 2, 3, 4};
  int left = kRanks;
  for (const auto& wave : waves) left -= static_cast<int>(wave.size());
  RankProcesses ranks(
      kRanks, [&](int rank) { return survive(rank, scratch.file("meeting"), left, rounds); });
  int wanted = 0;
  for (const auto& wave : waves) {
    wanted = rounds.value() + static_cast<int>(alive.size()) * 10;
    ASSERT_TRUE(rounds.wait_for(wanted, kShrinkLimit)) << "the ranks do not get on";
    for (const int victim : wave) {
      ranks.kill(victim, SIGKILL);
      std::erase(alive, victim);
    }
  }
  const auto ends = ranks.join(kShrinkLimit);
  int sum = 0;
  for (const int rank : alive) sum |= 1 << rank;
  for (std::size_t position = 0; position < alive.size(); ++position) {
    const auto& end = ends[static_cast<std::size_t>(alive[position])];
    EXPECT_FALSE(end.killed_at_the_limit) << "rank " << alive[position] << " hangs";
    EXPECT_EQ(end.report, std::to_string(position) + "/" + std::to_string(alive.size()) + " " +
                              std::to_string(sum))
        << "rank " << alive[position] << ", wait status " << end.wait_status;
  }
}

// spec: D7.shrink shrink after a failure: kill -9 of one rank
TEST(ShrinkGroup, AfterAKill) { play({{3}}); }

// spec: D7 shrink after a failure: of one rank, then of rank 0
TEST(ShrinkGroup, AfterAKillAndThatOfRankZero) { play({{2}, {0}}); }

// spec: D7 shrink after a failure: of two ranks at once, and of rank 0 meanwhile
TEST(ShrinkGroup, AfterTwoKillsAtOnce) { play({{1, 4}}); }
TEST(ShrinkGroup, AfterTwoKillsAtOnceRankZeroAmongThem) { play({{0, 3}, {1}}); }

/// Ranks 0 to 2 work together until rank 2 is killed; rank 3 then takes its place. Returns
/// "rank/size sum" of the new group.
std::string take_a_spare(int rank, const std::string& meeting, SharedCounter& rounds) {
  init_process_group({.backend = "native",
                      .init_method = "file://" + meeting,
                      .timeout = kShrinkLimit,
                      .world_size = 4,
                      .rank = rank});
  const auto trio = new_group({.ranks = std::vector<int>{0, 1, 2}});
  Group left;
  if (rank < 3) {
    try {
      for (;;) {
        all_reduce(torch::ones({10}), {.group = trio});
        rounds.add(1);
      }
    } catch (const DistError&) {
      left = shrink_group({}, {.group = trio});
    }
  }
  const auto grown = grow_group({0, 1, 3}, {.group = left});
  auto sum = torch::full({1}, 1 << rank, at::kInt);
  all_reduce(sum, {.group = grown});
  std::ostringstream said;
  said << get_rank(grown) << "/" << get_world_size(grown) << " " << sum.item<int>();
  try {
    destroy_process_group();
  } catch (const DistError&) {  // the default group lost a rank
  }
  return said.str();
}

// spec: D7.grow grow_group after a failure: the survivors' group takes in a rank of the job that
// stood by
TEST(GrowGroup, ASpareTakesThePlaceOfAKilledRank) {
  const testing::ScratchFolder scratch;
  SharedCounter rounds;
  RankProcesses ranks(
      4, [&](int rank) { return take_a_spare(rank, scratch.file("meeting"), rounds); });
  ASSERT_TRUE(rounds.wait_for(30, kShrinkLimit)) << "the ranks do not get on";
  ranks.kill(2, SIGKILL);
  const auto ends = ranks.join(kShrinkLimit);
  EXPECT_EQ(ends[0].report, "0/3 11");
  EXPECT_EQ(ends[1].report, "1/3 11");
  EXPECT_EQ(ends[3].report, "2/3 11");
}

}  // namespace
}  // namespace muster
