// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on a virtual clock whose nodes each have a part of the state: links are cut, launchers
// fall silent, workers fail. No commit is lost while all of its parts, or their copies, are there.

#include <gtest/gtest.h>

#include <utility>

#include "jobs/membership/testing/sim_membership.h"

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

}  // namespace
}  // namespace muster::membership::testing
