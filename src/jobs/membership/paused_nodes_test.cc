// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on a virtual clock whose launchers stand still or are cut off from the service and
// come back, at every point of what they do: no commit is lost while a process that has it lives.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "jobs/membership/testing/sim_membership.h"
#include "testing/budget.h"

namespace muster::membership::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SimNodeOptions elastic_options(std::uint64_t seed, int nodes) {
  SimNodeOptions options;
  options.seed = seed;
  options.epochs.min_nodes = 1;
  options.epochs.max_nodes = nodes;
  options.epochs.last_call = seconds(1);
  options.epochs.silence_patience = seconds(60);
  options.epochs.keeps_state = true;
  return options;
}

/// The job goes on with all nodes that live, and has lost nothing.
void expect_all_goes_on(const SimMembership& sim, std::size_t most) {
  for (const std::string& complaint : sim.complaints()) ADD_FAILURE() << complaint;
  EXPECT_EQ(sim.lost_commits(), 0);
  std::size_t alive = 0;
  for (const auto& [number, node] : sim.nodes()) alive += node.alive ? 1 : 0;
  const Epoch& last = sim.epochs().back();
  EXPECT_EQ(last.state, JobState::running) << last.reason;
  EXPECT_EQ(last.members.size(), std::min(alive, most));
  EXPECT_GT(sim.committed(), 0);
  std::size_t with_state = 0;
  for (const auto& [number, node] : sim.nodes())
    if (node.running == last.number && node.commits == sim.committed()) ++with_state;
  EXPECT_EQ(with_state, last.members.size());
}

/// Two nodes that train.
class TwoNodes {
 public:
  TwoNodes() {
    sim.start("host0");
    sim.start("host1");
    sim.run(seconds(5));
  }
  void pause(int node, Duration time) {
    sim.stop(node);
    sim.run(time);
    sim.go_on(node);
  }
  /// So many things happen. False: that takes longer than the job takes to be as it was.
  bool let_happen(int count) {
    const TimePoint end = sim.now() + seconds(4);
    for (int i = 0; i < count; ++i)
      if (!sim.step(end)) return false;
    return true;
  }

  SimMembership sim{elastic_options(1, 2)};
};

/// The points at which something is to be tried: all, or some of them.
int stride() { return muster::testing::long_tests() ? 1 : 3; }

// spec: L14.node a node that the others went on without joins again, and the only one that has the
// commits stands still at any point of that: they are waited for
TEST(PausedNodes, TheLastHolderStandsStillAtAnyPoint) {
  int points = 0;
  for (const int first : {0, 1}) {
    for (bool more = true; more; points += stride()) {
      SCOPED_TRACE("node " + std::to_string(first) + ", point " + std::to_string(points));
      TwoNodes job;
      job.pause(first, seconds(4));
      EXPECT_EQ(job.sim.epochs().back().members.size(), 1u);
      more = job.let_happen(points);
      job.pause(1 - first, seconds(10));
      job.sim.run(seconds(30));
      expect_all_goes_on(job.sim, 2);
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_GT(points, 20);
    points = 0;
  }
}

// spec: L14.node a launcher stands still at any point of its loops, for less and for more than its
// lease, also the one that decides, while another node joins
TEST(PausedNodes, ALauncherStandsStillAtAnyPoint) {
  for (const int node : {0, 1, 2}) {
    for (const Duration time : {seconds(1), seconds(4), seconds(20)}) {
      bool more = true;
      for (int point = 0; more; point += 3 * stride()) {
        SCOPED_TRACE("node " + std::to_string(node) + ", point " + std::to_string(point));
        SimMembership sim(elastic_options(1, 3));
        sim.start("host0");
        sim.start("host1");
        sim.run(seconds(3));
        sim.start("host2");
        const TimePoint end = sim.now() + seconds(4);
        for (int i = 0; more && i < point; ++i) more = sim.step(end);
        sim.stop(node);
        sim.run(time);
        sim.go_on(node);
        sim.run(seconds(30));
        expect_all_goes_on(sim, 3);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// spec: L14.service the service is silent for so long that some places run out, or all, at any
// point of a job: no epoch begins, and nothing is lost
TEST(PausedNodes, TheServiceIsSilentAtAnyPoint) {
  for (const Duration silence : {milliseconds(2150), milliseconds(2350), milliseconds(4000)}) {
    for (int point = 0; point < 60; point += stride()) {
      SCOPED_TRACE("silent for " + describe(silence) + ", point " + std::to_string(point));
      SimMembership sim(elastic_options(1, 3));
      for (const char* host : {"host0", "host1", "host2"}) sim.start(host);
      sim.run(seconds(5));
      for (int i = 0; i < point; ++i) ASSERT_TRUE(sim.step(sim.now() + seconds(1)));
      const std::size_t epochs = sim.epochs().size();
      sim.silence_service();
      sim.run(silence);
      sim.answer_again();
      sim.run(seconds(30));
      expect_all_goes_on(sim, 3);
      EXPECT_EQ(sim.epochs().size(), epochs);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// spec: L14.node, L14.lost_state a node is left out while it stands still or is cut off, and all
// that went on without it die, at any point: what it has is not lost
TEST(PausedNodes, TheOthersOfASilentHolderDie) {
  for (const bool stands : {true, false}) {
    for (int point = 0; point < 40; point += stride()) {
      SCOPED_TRACE((stands ? "stopped, point " : "cut off, point ") + std::to_string(point));
      TwoNodes job;
      if (stands)
        job.sim.stop(1);
      else
        job.sim.cut_off(1);
      job.sim.run(seconds(4));
      EXPECT_EQ(job.sim.epochs().back().members.size(), 1u);
      job.sim.start("host2");
      job.let_happen(point);
      job.sim.kill(0);
      job.sim.kill(2);
      job.sim.start("host3");
      job.sim.start("host4");
      job.sim.run(seconds(20));
      if (stands)
        job.sim.go_on(1);
      else
        job.sim.heal(1);
      job.sim.run(seconds(90));  // who came after the others had died takes them for silent
      expect_all_goes_on(job.sim, 2);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

/// Leases run out one after another, or several at a time, while nodes join; nodes die only where
/// another one has the commits too.
void play(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t limit) { return static_cast<int>(random() % limit); };
  const int most = 2 + below(4);
  SimMembership sim(elastic_options(seed, most));
  std::vector<int> nodes;
  const auto start = [&] { nodes.push_back(sim.start("host" + std::to_string(below(8)))); };
  start();
  start();
  sim.run(seconds(5));
  std::set<int> stopped, cut;
  const auto all_back = [&] {
    for (const int node : std::exchange(stopped, {})) sim.go_on(node);
    for (const int node : std::exchange(cut, {})) sim.heal(node);
  };
  Duration out{0};
  const auto wait = [&](Duration time) {
    out += time;
    if (out > seconds(40)) all_back();  // their workers would end
    if (stopped.empty() && cut.empty()) out = Duration(0);
    sim.run(time);
  };
  // A node is left out, and all that go on without it die before it is back.
  const auto others_die = [&] {
    all_back();
    sim.run(seconds(10));
    const std::int64_t last = sim.epochs().back().number;
    const int kept = nodes[random() % nodes.size()];
    const auto is_member = [&](int node) {
      const SimMembership::Node& each = sim.nodes().at(node);
      return each.alive && each.running == last && each.commits == sim.committed();
    };
    if (!is_member(kept)) return;
    if (below(2) == 0) {
      stopped.insert(kept);
      sim.stop(kept);
    } else {
      cut.insert(kept);
      sim.cut_off(kept);
    }
    sim.run(milliseconds(below(6000)));
    start();
    sim.run(milliseconds(below(1000)));
    const std::vector<int> all = nodes;
    for (const int node : all)
      if (node != kept && sim.nodes().at(node).alive && sim.nodes().at(node).commits > 0)
        sim.kill(node);
    start();
    sim.run(milliseconds(below(6000)));
    all_back();
    sim.run(seconds(10));
  };
  for (int step = 0; step < 25; ++step) {
    wait(milliseconds(below(4) == 0 ? below(6000) : below(400)));
    const int node = nodes[random() % nodes.size()];
    switch (below(10)) {
      case 8:
        out += seconds(5);
        sim.silence_service();
        sim.run(milliseconds(below(5000)));
        sim.answer_again();
        break;
      case 9: others_die(); break;
      case 0:
        if (nodes.size() < 10) start();
        break;
      case 1:
      case 2:
      case 3:
        if (cut.insert(node).second && !stopped.contains(node)) sim.cut_off(node);
        break;
      case 4:
        if (stopped.insert(node).second && !cut.contains(node)) sim.stop(node);
        break;
      case 5: all_back(); break;
      case 6:
        if (!stopped.contains(node) && cut.erase(node) > 0) sim.heal(node);
        break;
      default: {
        all_back();
        sim.run(seconds(10));
        const std::int64_t last = sim.epochs().back().number;
        const auto holders = std::ranges::count_if(sim.nodes(), [&](const auto& each) {
          return each.second.alive && each.second.running == last &&
                 each.second.commits == sim.committed();
        });
        if (holders > 1) sim.kill(node);
      }
    }
  }
  all_back();
  sim.run(seconds(90));
  expect_all_goes_on(sim, static_cast<std::size_t>(most));
}

// spec: L14.node 300 jobs whose leases run out one after another lose no commit that a process has
// that lives; 10,000 in `make test-long`
TEST(PausedNodes, SeedsOfPauses) {
  const int seeds = muster::testing::test_rounds(300, 10'000);
  const std::uint64_t first = muster::testing::test_seed();
  for (int i = 0; i < seeds; ++i) {
    SCOPED_TRACE("MUSTER_TEST_SEED=" + std::to_string(first + static_cast<std::uint64_t>(i)));
    play(first + static_cast<std::uint64_t>(i));
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace muster::membership::testing
