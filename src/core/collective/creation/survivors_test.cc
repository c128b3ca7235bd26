// SPDX-License-Identifier: BSD-3-Clause
// How survivors agree on who is left: the state machine, and ranks as threads. Whole jobs with
// kills are in testing/sim_shrink_test.cc.
#include "core/collective/creation/survivors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "testing/limits.h"
#include "testing/rank_threads.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

using std::chrono::seconds;
using testing::RankThreadsOptions;
using testing::run_ranks;
using testing::Wire;

/// Members' state machines joined by queues. A seed decides which message is next, and which member
/// dies when.
class Crowd {
 public:
  Crowd(int members, std::uint64_t seed)
      : random_(seed), queues_(static_cast<std::size_t>(members * members)) {
    for (int i = 0; i < members; ++i)
      machines_.emplace_back(i, std::vector<bool>(static_cast<std::size_t>(members)), 1);
    dead_.resize(static_cast<std::size_t>(members));
  }

  /// Runs until nothing moves any more; `deaths` are spread over the run.
  void run(std::vector<int> deaths) {
    const int n = static_cast<int>(machines_.size());
    while (true) {
      std::vector<std::pair<int, int>> choices;
      for (int a = 0; a < n; ++a) {
        if (alive(a) && machines_[index(a)].take_changed()) {
          for (int b = 0; b < n; ++b) {
            if (a != b && machines_[index(a)].includes(b))
              queue(a, b).push_back(machines_[index(a)].view());
          }
        }
        for (int b = 0; b < n; ++b) {
          if (alive(b) && !queue(a, b).empty()) choices.emplace_back(a, b);
          if (alive(b) && !alive(a) && queue(a, b).empty() && machines_[index(b)].includes(a))
            choices.emplace_back(a, b);
        }
      }
      if (!deaths.empty() && (choices.empty() || random_() % 8 == 0)) {
        kill(deaths.back());
        deaths.pop_back();
        continue;
      }
      if (choices.empty()) return;
      const auto [a, b] = choices[random_() % choices.size()];
      if (queue(a, b).empty()) {
        machines_[index(b)].gone(a);
      } else {
        machines_[index(b)].heard(a, queue(a, b).front());
        queue(a, b).pop_front();
      }
    }
  }

  bool alive(int member) const { return !dead_[index(member)]; }
  const SurvivorViews& machine(int member) const { return machines_[index(member)]; }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  std::deque<SurvivorViews::SurvivorView>& queue(int from, int to) {
    return queues_[index(from) * machines_.size() + index(to)];
  }
  // Dies while sending: only some members receive its last view.
  void kill(int member) {
    dead_[index(member)] = true;
    for (int b = 0; b < static_cast<int>(machines_.size()); ++b) {
      if (!queue(member, b).empty() && random_() % 2 == 0) queue(member, b).pop_back();
    }
  }

  std::mt19937_64 random_;
  std::vector<SurvivorViews> machines_;
  std::vector<bool> dead_;
  std::vector<std::deque<SurvivorViews::SurvivorView>> queues_;
};

// spec: D7 shrink after a failure: whichever member dies, and whenever, the survivors decide on the
// same members, all of them alive
TEST(SurvivorViews, AllDecideTheSameWhicheverMemberDies) {
  const int runs = testing::long_tests() ? 20000 : 1000;
  for (int run = 0; run < runs; ++run) {
    std::mt19937_64 random(testing::test_seed() + static_cast<std::uint64_t>(run));
    const int members = 2 + static_cast<int>(random() % 7);
    std::vector<int> deaths;
    for (int i = 0; i < members; ++i) {
      if (random() % 3 == 0 && static_cast<int>(deaths.size()) < members - 1) deaths.push_back(i);
    }
    std::shuffle(deaths.begin(), deaths.end(), random);
    Crowd crowd(members, random());
    crowd.run(deaths);
    for (int i = 0; i < members; ++i) {
      if (!crowd.alive(i)) continue;
      ASSERT_TRUE(crowd.machine(i).decided()) << "run " << run << ", member " << i;
      for (int j = 0; j < members; ++j)
        ASSERT_EQ(crowd.machine(i).includes(j), crowd.alive(j))
            << "run " << run << ", member " << i;
    }
  }
}

TEST(SurvivorViews, AnExcludedMemberLearnsIt) {
  SurvivorViews views(1, {false, false, false}, 1);
  views.heard(0, {1, {false, true, false}});
  EXPECT_TRUE(views.excluded());
  EXPECT_FALSE(views.decided());
}

TEST(SurvivorViews, AViewOfAnEarlierAttemptDecidesNothing) {
  SurvivorViews views(0, {false, false}, 2);
  EXPECT_TRUE(views.take_changed());
  views.heard(1, {1, {false, false}});
  EXPECT_FALSE(views.decided());
  EXPECT_EQ(views.awaited(), std::vector<int>{1});
  views.heard(1, {2, {false, false}});
  EXPECT_TRUE(views.decided());
  views.start_over();
  EXPECT_FALSE(views.decided());
}

Status sum_over(Communicator& group, std::int64_t mine, std::int64_t& sum) {
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::int64;
  args.inputs = {std::as_bytes(std::span(&mine, 1))};
  args.outputs = {std::as_writable_bytes(std::span(&sum, 1))};
  return group.run(args, steady_clock().now() + muster::testing::kMustHappen);
}

CommunicatorOptions named(const std::string& name) {
  CommunicatorOptions options;
  options.name = name;
  options.timeout = muster::testing::kMustHappen;
  return options;
}

// spec: D7 shrink: survivors go on in a new group after the death of any rank, and again after the
// next
TEST(Shrink, ContinuesWithTheSurvivorsOfTwoDeaths) {
  for (const Wire wire : {Wire::loopback, Wire::region}) {
    RankThreadsOptions options;
    options.ranks = 5;
    options.wire = wire;
    options.hub = transport::make_loopback_hub(5, wire == Wire::region, 5);
    std::barrier done(5);  // no rank dies while others still need it
    run_ranks(options, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      auto world = Communicator::create(fabric, {0, 1, 2, 3, 4}, named("world"));
      ASSERT_TRUE(world.ok()) << world.status().message();
      std::int64_t sum = 0;
      ASSERT_TRUE(sum_over(**world, 1, sum).ok());
      Lineage lineage{"world", {0, 1, 2, 3, 4}, {}, 0};
      std::shared_ptr<Communicator> group = *world;
      std::int64_t expected = 0b11111;
      for (const int victim : {0, 3}) {
        if (rank == victim) {
          done.arrive_and_wait();
          done.arrive_and_drop();
          return options.hub->kill(rank);
        }
        done.arrive_and_wait();
        done.arrive_and_wait();
        while (sum_over(*group, 1, sum).ok()) {
        }
        auto shrunk = shrink(fabric, lineage, {}, named("left"));
        ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
        group = shrunk->communicator;
        lineage = shrunk->lineage;
        expected &= ~(std::int64_t{1} << victim);
        const Status status = sum_over(*group, std::int64_t{1} << rank, sum);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(sum, expected);
      }
      EXPECT_EQ(group->size(), 3);
      EXPECT_TRUE(group->close(steady_clock().now() + muster::testing::kMustHappen).ok());
    });
  }
}

// spec: D7 shrink leaves out living ranks where asked to, and a caller that is left out is told
TEST(Shrink, ExcludesTheGivenRanks) {
  run_ranks(3, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    auto shrunk = shrink(fabric, {"world", {0, 1, 2}, {}, 0}, {1}, named("left"));
    if (rank == 1) {
      ASSERT_FALSE(shrunk.ok());
      EXPECT_EQ(shrunk.status().code(), Code::invalid_argument);
      return;
    }
    ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
    std::int64_t sum = 0;
    ASSERT_TRUE(sum_over(*shrunk->communicator, rank, sum).ok());
    EXPECT_EQ(sum, 2);
  });
}

TEST(Shrink, NamesALivingMemberThatDoesNotCall) {
  run_ranks(3, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    if (rank == 2) return;
    auto options = named("left");
    options.timeout = std::chrono::seconds(3);
    const auto shrunk = shrink(fabric, {"world", {0, 1, 2}, {}, 0}, {}, options);
    ASSERT_FALSE(shrunk.ok());
    EXPECT_EQ(shrunk.status().code(), Code::timed_out);
    EXPECT_EQ(shrunk.status().ranks(), std::vector<int>{2}) << shrunk.status().message();
  });
}

}  // namespace
}  // namespace muster::collective
