// Every operation x element type x reduction x number of ranks x wire, against a direct computation: sizes from nothing to more than
// every chunk, even and uneven, in place or not, private and arena memory mixed among the ranks, blocking and started. Sampled within a
// budget; whole with MUSTER_TEST_LONG=1. A failure prints the cell and the seed that replays it.

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <iostream>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/collective/suite_test_cells.h"
#include "muster/testing/budget.h"
#include "muster/testing/rank_threads.h"
#include "muster/testing/seed.h"

namespace muster::collective::suite {
namespace {

/// All ranks play the cells in the same order, until the time is over or something is wrong; says how many were played.
std::size_t play_all(Wire wire, int ranks, const std::vector<Cell>& cells, std::chrono::duration<double> budget, std::string& trouble) {
  constexpr std::size_t kBlock = 2;
  std::optional<std::chrono::steady_clock::time_point> end;  // from when the ranks have met
  std::mutex lock;
  std::atomic<bool> go_on{true};
  std::atomic<std::size_t> played{0};
  const auto decide = [&]() noexcept {
    const auto now = std::chrono::steady_clock::now();
    if (!end) end = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(budget);
    go_on.store(trouble.empty() && now < *end);
  };
  std::barrier gate(ranks, decide);
  testing::run_ranks(ranks, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const auto report = [&](const std::string& what) {
      const std::lock_guard guard(lock);
      trouble += "rank " + std::to_string(rank) + ": " + what + "\n";
    };
    std::vector<int> members(static_cast<std::size_t>(ranks));
    for (int i = 0; i < ranks; ++i) members[static_cast<std::size_t>(i)] = i;
    CommunicatorOptions options;
    options.name = "suite";
    options.timeout = std::chrono::seconds(60);
    auto group = Communicator::create(fabric, members, options);
    if (!group.ok()) report(group.status().message());
    gate.arrive_and_wait();
    for (std::size_t at = 0; at < cells.size() && go_on.load(); at += kBlock) {
      for (std::size_t i = at; i < std::min(at + kBlock, cells.size()); ++i) {
        const std::string wrong = Player(cells[i], rank).play(**group);
        if (!wrong.empty()) report(cells[i].text(wire) + ": " + wrong);
        if (rank == 0) played.fetch_add(1);
        if (!wrong.empty() && (*group)->failure().ok()) (*group)->abort("a cell has failed");
        if (!wrong.empty()) break;
      }
      gate.arrive_and_wait();
    }
    if (!group.ok() || !trouble.empty()) return;
    const Status closed = (*group)->close(steady_clock().now() + std::chrono::seconds(60));
    if (!closed.ok()) report("close: " + closed.message());
  });
  return played.load();
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

class CollectiveSuite : public ::testing::TestWithParam<std::tuple<Wire, int>> {};

// spec: F2 broadcast
// spec: F3 all_reduce in place, bitwise identical on every rank, complex too
// spec: F4 reduce: only dst holds the result; elsewhere the tensor is left as it was
// spec: F5 all_gather, uneven sizes too
// spec: F7 gather: list on dst only
// spec: F8 scatter: list on src, complex
// spec: F9 reduce_scatter, uneven
// spec: F11 uneven splits, empty splits; complex
// spec: F12 all_to_all: lists, uneven
// spec: F13 barrier
// spec: F14 SUM PRODUCT MIN MAX BAND BOR BXOR AVG PREMUL_SUM
// spec: F15 every dtype; operations that only move bytes take every width; MIN and MAX pass NaN on; 16-bit floats round once
// spec: F16 zero-element tensors, one-rank groups
// spec: F19 PREMUL_SUM multiplies each rank's input; AVG: the sum in the order of ranks, then one division; integers truncate
// spec: F20 ranks that do not need the list give none
// spec: A1 shared memory off: tcp alone
TEST_P(CollectiveSuite, EveryCellMatchesTheDirectComputation) {
  const auto [wire, ranks] = GetParam();
  const std::uint64_t seed = testing::test_seed();
  std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(wire) * 100 + static_cast<std::uint64_t>(ranks));
  const auto budget = testing::test_budget(20) / static_cast<double>(std::size(kRanks) * std::size(testing::kWires));
  const auto cells = draw_cells(random, ranks);
  std::string trouble;
  const std::size_t played = play_all(wire, ranks, cells, budget, trouble);
  ASSERT_TRUE(trouble.empty()) << trouble << "replay with MUSTER_TEST_SEED=" << seed;
  // A short budget still plays something on every wire at every number of ranks; a whole one plays all.
  ASSERT_GE(played, testing::whole_matrices() ? cells.size() : std::size_t{2});
  std::cout << "played " << played << " of " << cells.size() << " cells with seed " << seed << "\n";
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveSuite, ::testing::Combine(::testing::ValuesIn(testing::kWires), ::testing::ValuesIn(kRanks)),
                         [](const auto& cell) {
                           return std::string(testing::wire_name(std::get<0>(cell.param))) + "_" + std::to_string(std::get<1>(cell.param));
                         });

}  // namespace
}  // namespace muster::collective::suite
