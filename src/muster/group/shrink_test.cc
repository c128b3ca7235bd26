// Shrinking groups after real deaths of processes (SIGKILL).
#include <signal.h>

#include <sstream>

#include "muster/group/testing/ranks.h"
#include "muster/testing/rank_processes.h"
#include "muster/testing/scratch_folder.h"

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

// spec: D7 shrink after a failure: kill -9 of one rank
TEST(ShrinkGroup, AfterAKill) { play({{3}}); }

// spec: D7 shrink after a failure: of one rank, then of rank 0
TEST(ShrinkGroup, AfterAKillAndThatOfRankZero) { play({{2}, {0}}); }

// spec: D7 shrink after a failure: of two ranks at once, and of rank 0 meanwhile
TEST(ShrinkGroup, AfterTwoKillsAtOnce) { play({{1, 4}}); }
TEST(ShrinkGroup, AfterTwoKillsAtOnceRankZeroAmongThem) { play({{0, 3}, {1}}); }

}  // namespace
}  // namespace muster
