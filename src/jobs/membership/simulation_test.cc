// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on a virtual clock: seeds decide who comes, dies, falls silent, fails and returns.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "jobs/membership/testing/sim_membership.h"
#include "testing/budget.h"

namespace muster::membership::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Members of the last epoch that run it, by slot.
std::map<int, int> running(const SimMembership& sim) {
  std::map<int, int> slots;
  for (const auto& [number, node] : sim.nodes()) {
    if (node.running > 0 && node.running == sim.epochs().back().number) slots[node.slot] = number;
  }
  return slots;
}

/// A job under random faults, then left alone: it must settle with every node that lives, or end
/// with a reason.
void play(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t limit) { return static_cast<int>(random() % limit); };
  SimNodeOptions options;
  options.seed = seed;
  options.epochs.max_nodes = 2 + below(7);
  options.epochs.min_nodes = 1 + below(static_cast<std::uint64_t>(options.epochs.max_nodes));
  options.epochs.max_restarts = below(6);
  options.epochs.last_call = milliseconds(below(3000));
  options.epochs.repair_timeout = milliseconds(below(3) == 0 ? below(4000) : 0);
  options.epochs.majority = below(4) == 0;
  options.epochs.join_timeout = seconds(20);
  SimMembership sim(options);
  const int hosts = 1 + below(10);
  std::vector<int> nodes, cut;
  const auto start = [&] {
    nodes.push_back(sim.start("host" + std::to_string(below(static_cast<std::uint64_t>(hosts)))));
  };
  const auto any = [&] { return nodes[random() % nodes.size()]; };
  for (int i = 0; i < options.epochs.max_nodes; ++i) start();
  for (int step = 0; step < 40; ++step) {
    sim.run(milliseconds(below(1500)));
    switch (below(8)) {
      case 0: start(); break;
      case 1:
      case 2: sim.kill(any()); break;
      case 3: cut.push_back(any()), sim.cut_off(cut.back()); break;
      case 4:
        for (const int node : std::exchange(cut, {})) sim.heal(node);
        break;
      case 5: sim.fail(any()); break;
      case 6:
        if (below(6) == 0) sim.succeed(any());
        break;
      default: start();
    }
  }
  for (const int node : cut) sim.heal(node);
  for (const auto& [number, node] :
       sim.nodes()) {  // no node waits for a worker that fails for ever
    if (node.alive && node.report.phase == NodePhase::succeeded) sim.kill(number);
  }
  sim.run(seconds(60));
  for (const std::string& complaint : sim.complaints()) ADD_FAILURE() << complaint;
  const auto alive = static_cast<std::size_t>(std::count_if(
      sim.nodes().begin(), sim.nodes().end(), [](const auto& each) { return each.second.alive; }));
  if (alive == 0 && sim.epochs().empty()) return;  // all died before enough of them had come
  ASSERT_FALSE(sim.epochs().empty());
  const Epoch& last = sim.epochs().back();
  if (last.state != JobState::running) {
    EXPECT_FALSE(last.reason.empty());
    return;
  }
  if (alive == 0) return;  // no node is left to end the job
  std::size_t ended_well = 0;
  for (const auto& [number, node] : sim.nodes()) {
    if (node.running == last.number) ended_well = node.view.succeeded();
  }
  const auto most = static_cast<std::size_t>(options.epochs.max_nodes);
  if (ended_well == 0) {
    EXPECT_EQ(last.members.size(), std::min(alive, most));
    EXPECT_EQ(running(sim).size(), last.members.size());
  }
  for (const auto& [number, node] : sim.nodes()) sim.succeed(number);
  sim.run(seconds(60));
  EXPECT_EQ(sim.epochs().back().state, JobState::succeeded) << sim.epochs().back().reason;
}

// spec: L5 300 simulated jobs: no two epochs compete, slots are kept, limits are kept, and the job
// settles; 10,000 in `make test-long`
TEST(SimMembership, SeedsOfFaults) {
  const int seeds = muster::testing::test_rounds(300, 10'000);
  const std::uint64_t first = muster::testing::test_seed();
  for (int i = 0; i < seeds; ++i) {
    SCOPED_TRACE("MUSTER_TEST_SEED=" + std::to_string(first + static_cast<std::uint64_t>(i)));
    play(first + static_cast<std::uint64_t>(i));
    if (::testing::Test::HasFatalFailure() || ::testing::Test::HasNonfatalFailure()) break;
  }
}

/// The cost of one event to a node, in nodes and slots looked at, in a job of `size` nodes that die
/// and come back one after another.
double cost_of_an_event(int size) {
  SimNodeOptions options;
  options.epochs.min_nodes = 1;
  options.epochs.max_nodes = size;
  SimMembership sim(options);
  for (int i = 0; i < size; ++i) sim.start("host" + std::to_string(i));
  sim.run(seconds(60));
  EXPECT_EQ(running(sim).size(), static_cast<std::size_t>(size));
  const int events = muster::testing::long_tests() ? 10 : 3;
  sim.take_looked_at();
  for (int i = 0; i < events; ++i) {
    const std::string host = sim.nodes().at(i).host;
    const int slot = sim.nodes().at(i).slot;
    sim.kill(i);
    sim.run(seconds(1));
    EXPECT_EQ(running(sim).size(), static_cast<std::size_t>(size) - 1);
    const int again = sim.start(host);
    sim.run(seconds(1));
    EXPECT_EQ(sim.nodes().at(again).slot, slot) << "it has its host's slot again";
  }
  EXPECT_EQ(running(sim).size(), static_cast<std::size_t>(size));
  for (const std::string& complaint : sim.complaints()) ADD_FAILURE() << complaint;
  return static_cast<double>(sim.take_looked_at()) / (2 * events) / size;
}

// spec: L1 1,000 nodes join, die and come back in one thread; what an event costs each node does
// not grow with their number
TEST(SimMembership, AThousandNodes) {
  const int most = muster::testing::long_tests() ? 1000 : 200;
  const double small = cost_of_an_event(10), large = cost_of_an_event(most);
  std::printf("a node dies or comes: %.1f looked at by each of 10 nodes, %.1f by each of %d\n",
              small, large, most);
  EXPECT_LT(large, 3 * small);
}

}  // namespace
}  // namespace muster::membership::testing
