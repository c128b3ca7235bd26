// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on a virtual clock whose nodes each have a part of the state: links are cut, launchers
// fall silent, workers fail. No commit is lost while all of its parts, or their copies, are there.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "jobs/membership/testing/sim_membership.h"
#include "testing/budget.h"

namespace muster::membership::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SimNodeOptions sharded_options(std::uint64_t seed, int nodes, int restarts) {
  SimNodeOptions options;
  options.seed = seed;
  options.divided = true;
  options.epochs.min_nodes = 1;
  options.epochs.max_nodes = nodes;
  options.epochs.max_restarts = restarts;
  options.epochs.last_call = seconds(1);
  options.epochs.silence_patience = seconds(60);
  options.epochs.keeps_state = true;
  return options;
}

/// A job of so many nodes that train.
class ShardedJob {
 public:
  ShardedJob(int nodes, int restarts) : sim(sharded_options(1, nodes, restarts)) {
    for (int i = 0; i < nodes; ++i) sim.start("host" + std::to_string(i));
    sim.run(seconds(5));
  }
  const Epoch& last() const { return sim.epochs().back(); }
  void expect_that_it_trains(std::size_t nodes) {
    for (const std::string& complaint : sim.complaints()) ADD_FAILURE() << complaint;
    const std::int64_t before = sim.committed();
    sim.run(seconds(2));
    EXPECT_EQ(last().state, JobState::running) << last().reason;
    EXPECT_EQ(last().members.size(), nodes);
    EXPECT_GT(sim.committed(), before);
    EXPECT_EQ(sim.lost_commits(), 0);
  }

  SimMembership sim;
};

// spec: L15, L7 one link that stays cut costs a job that has no restarts one node, and no commit;
// the node is back once the link is
TEST(ShardedNodes, OneCutLinkCostsNoCommit) {
  for (const auto& [one, other] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
    SCOPED_TRACE(std::to_string(one) + " and " + std::to_string(other));
    ShardedJob job(3, 0);
    job.sim.cut_link(one, other);
    job.sim.run(seconds(10));
    job.expect_that_it_trains(2);
    job.sim.mend_link(one, other);
    job.sim.run(seconds(70));
    job.expect_that_it_trains(3);
    EXPECT_EQ(job.last().restarts, 0);
  }
}

// spec: L15, L7 two links that are cut at once never cost both copies of a part: the job goes on
// once they are mended, or ends by name where it has no restarts
TEST(ShardedNodes, TwoCutLinksCostNoCommit) {
  for (const int restarts : {0, 1000}) {
    SCOPED_TRACE(restarts);
    ShardedJob job(4, restarts);
    job.sim.cut_link(1, 3);
    job.sim.cut_link(0, 2);
    job.sim.run(seconds(20));
    EXPECT_EQ(job.sim.lost_commits(), 0);
    job.sim.mend_link(1, 3);
    job.sim.mend_link(0, 2);
    job.sim.run(seconds(90));
    if (restarts > 0) {
      job.expect_that_it_trains(4);
    } else {
      EXPECT_EQ(job.last().state, JobState::failed);
      EXPECT_NE(job.last().reason.find("no restart is left"), std::string::npos)
          << job.last().reason;
    }
  }
}

// spec: L14.node two neighbours fall silent one after the other, with no commit between: the second
// is waited for, as the copy of the first one's part is on it
TEST(ShardedNodes, TwoSilentNeighboursAreWaitedFor) {
  ShardedJob job(3, 0);
  job.sim.stop(1);
  while (job.last().members.size() == 3) ASSERT_TRUE(job.sim.step(job.sim.now() + seconds(5)));
  job.sim.stop(2);
  job.sim.run(seconds(20));
  job.sim.go_on(2);
  job.sim.run(seconds(5));
  job.sim.go_on(1);
  job.sim.run(seconds(10));
  job.expect_that_it_trains(3);
}

// spec: L7, L14.node a worker that fails takes no part with it: its launcher has it, and tells so
TEST(ShardedNodes, AFailedWorkerTakesNoPartWithIt) {
  ShardedJob job(3, 1000);
  job.sim.fail(1);
  job.sim.run(milliseconds(500));
  job.sim.stop(1);
  job.sim.stop(2);
  job.sim.run(seconds(20));
  job.sim.go_on(1);
  job.sim.go_on(2);
  job.sim.run(seconds(10));
  job.expect_that_it_trains(3);
}

// spec: L7, L14.node a worker fails and takes its part with it, as its launcher has none of its
// memory, and the node that has the copy falls silent: it is waited for
TEST(ShardedNodes, APartThatIsGoneHasOneCopy) {
  for (const Duration between : {milliseconds(0), milliseconds(100), milliseconds(250)}) {
    ShardedJob job(3, 1000);
    job.sim.lose_memory(1);
    job.sim.run(between);
    job.sim.stop(2);
    job.sim.run(seconds(20));
    job.sim.go_on(2);
    job.sim.run(seconds(10));
    job.expect_that_it_trains(3);
  }
}

/// Whether the last epoch has made a commit, or restored one, of which all its members have parts.
bool all_have_committed(const SimMembership& sim) {
  const Epoch& last = sim.epochs().back();
  const SimMembership::Commit commit{last.number, sim.committed(), last.members.size()};
  const auto holders = std::ranges::count_if(sim.nodes(), [&](const auto& each) {
    return each.second.alive && each.second.running == last.number && each.second.held == commit;
  });
  return holders == std::ssize(last.members);
}

/// One link is cut at a time, while leases run out and workers fail. A node dies only once all that
/// live have a commit of the same epoch, and then nothing else happens before the next one.
class RandomFaults {
 public:
  explicit RandomFaults(std::uint64_t seed)
      : random_(seed), most_(2 + below(4)), sim(sharded_options(seed, most_, 100'000)) {
    for (int i = 0; i < most_; ++i) start();
    sim.run(seconds(5));
  }
  void wait() {
    const Duration time = milliseconds(below(4) == 0 ? below(6000) : below(400));
    out_ += time;
    if (out_ > seconds(40)) all_back();  // their workers would end
    if (stopped_.empty() && cut_.empty()) out_ = Duration(0);
    sim.run(time);
  }
  void happen() {
    const int node = any();
    switch (below(9)) {
      case 7: lose_a_part(node); break;
      case 0:
        if (nodes_.size() < 8) start();
        break;
      case 1:
      case 2:
        if (cut_.insert(node).second && !stopped_.contains(node)) sim.cut_off(node);
        break;
      case 3:
        if (stopped_.insert(node).second && !cut_.contains(node)) sim.stop(node);
        break;
      case 4: cut_link(node, any()); break;
      case 5: all_back(); break;
      case 6:
        if (!stopped_.contains(node) && !cut_.contains(node)) sim.fail(node);
        break;
      default:
        all_back();
        sim.run(seconds(10));
        if (sim.epochs().back().members.size() < 2 || !all_have_committed(sim)) break;
        sim.kill(node);
        sim.run(seconds(10));
    }
  }
  void all_back() {
    for (const int node : std::exchange(stopped_, {})) sim.go_on(node);
    for (const int node : std::exchange(cut_, {})) sim.heal(node);
    if (link_) sim.mend_link(link_->first, link_->second);
    link_.reset();
  }

 private:
  /// Its copy falls silent soon after.
  void lose_a_part(int node) {
    all_back();
    sim.run(seconds(10));
    if (sim.epochs().back().members.size() < 2 || !all_have_committed(sim)) return;
    sim.lose_memory(node);
    sim.run(milliseconds(below(400)));
    const int other = any();
    stopped_.insert(other);
    sim.stop(other);
    sim.run(milliseconds(below(8000)));
    all_back();
    sim.run(seconds(10));
  }
  int below(std::uint64_t limit) { return static_cast<int>(random_() % limit); }
  int any() { return nodes_[random_() % nodes_.size()]; }
  void start() { nodes_.push_back(sim.start("host" + std::to_string(below(8)))); }
  void cut_link(int one, int other) {
    if (link_ || one == other) return;
    link_.emplace(one, other);
    sim.cut_link(one, other);
  }

  std::mt19937_64 random_;
  const int most_;
  std::vector<int> nodes_;
  std::set<int> stopped_, cut_;
  std::optional<std::pair<int, int>> link_;
  Duration out_{0};

 public:
  SimMembership sim;
};

void play_sharded(std::uint64_t seed) {
  RandomFaults job(seed);
  for (int step = 0; step < 25; ++step) {
    job.wait();
    job.happen();
  }
  job.all_back();
  job.sim.run(seconds(150));
  for (const std::string& complaint : job.sim.complaints()) ADD_FAILURE() << complaint;
  EXPECT_EQ(job.sim.lost_commits(), 0);
  const Epoch& last = job.sim.epochs().back();
  EXPECT_EQ(last.state, JobState::running) << last.reason;
  EXPECT_TRUE(all_have_committed(job.sim));
  EXPECT_GT(job.sim.committed(), 0);
}

// spec: L7, L14.node, L15 300 jobs with a divided state under cut links, silence and failures lose
// no commit whose parts are there; 10,000 in `make test-long`
TEST(ShardedNodes, SeedsOfFaults) {
  const int seeds = muster::testing::test_rounds(300, 10'000);
  const std::uint64_t first = muster::testing::test_seed();
  for (int i = 0; i < seeds; ++i) {
    SCOPED_TRACE("MUSTER_TEST_SEED=" + std::to_string(first + static_cast<std::uint64_t>(i)));
    play_sharded(first + static_cast<std::uint64_t>(i));
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace muster::membership::testing
