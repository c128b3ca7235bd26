// SPDX-License-Identifier: BSD-3-Clause
// Every operation x element type x reduction x number of ranks x wire, compared with a direct
// computation: sizes from nothing to more than every chunk, even and uneven, in place or not,
// private and arena memory mixed among the ranks, blocking and started. Sampled within a budget;
// complete with MUSTER_TEST_LONG=1. A failure prints the cell and the seed that replays it.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <iostream>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/select/tuning.h"
#include "core/collective/testing/suite_cells.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/rank_threads.h"
#include "testing/sampled_cells.h"
#include "testing/seed.h"

namespace muster::collective::suite {
namespace {

/// A different tuning on every rank, of which only the first member's must apply: some operations
/// by a random algorithm, the others by the defaults.
std::shared_ptr<const Tuning> drawn_tuning(int rank, int ranks) {
  std::mt19937_64 random(testing::test_seed() * 31 +
                         static_cast<std::uint64_t>(100 * ranks + rank));
  auto tuning = std::make_shared<Tuning>();
  for (const Medium medium : {Medium::network, Medium::shared_memory}) {
    for (const Op op : {Op::broadcast, Op::all_reduce, Op::reduce, Op::all_gather,
                        Op::reduce_scatter, Op::gather, Op::scatter}) {
      const auto row = algorithms_of(medium, op);
      if (random() % 2 == 0) tuning->forced.emplace_back(op, row[random() % row.size()]);
    }
  }
  return tuning;
}

Result<std::shared_ptr<Communicator>> create_whole_group(
    const std::shared_ptr<transport::Fabric>& fabric, int ranks, bool use_region = true) {
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  CommunicatorOptions options;
  options.name = "suite";
  options.timeout = muster::testing::kMustHappen;
  options.use_region = use_region;
  options.tuning = drawn_tuning(fabric->rank(), ranks);
  return Communicator::create(fabric, members, options);
}

/// All ranks play the cells in the same order until the time is up or a cell fails. Returns the
/// number of cells played.
std::size_t play_all(Wire wire, int ranks, const std::vector<Cell>& cells,
                     std::chrono::duration<double> budget, std::string& trouble) {
  constexpr std::size_t kBlock = 2;
  std::optional<std::chrono::steady_clock::time_point> end;  // set when the ranks have met
  std::mutex lock;
  std::atomic<bool> go_on{true};
  std::atomic<std::size_t> played{0};
  // The current block; created and dropped while no rank plays.
  std::size_t next = 0;
  std::vector<std::unique_ptr<Answers>> answers;
  const auto decide = [&]() noexcept {
    answers.clear();
    for (; answers.size() < kBlock && next < cells.size(); ++next)
      answers.push_back(std::make_unique<Answers>(cells[next]));
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
    auto group = create_whole_group(fabric, ranks);
    if (!group.ok()) report(group.status().message());
    gate.arrive_and_wait();
    for (std::size_t at = 0; at < cells.size() && go_on.load(); at += kBlock) {
      for (std::size_t i = at; i < std::min(at + kBlock, cells.size()); ++i) {
        const std::string wrong = Player(*answers[i - at], rank).play(**group);
        if (!wrong.empty()) report(cells[i].text(wire) + ": " + wrong);
        if (rank == 0) played.fetch_add(1);
        if (!wrong.empty() && (*group)->failure().ok()) (*group)->abort("a cell has failed");
        if (!wrong.empty()) break;
      }
      gate.arrive_and_wait();
    }
    if (!group.ok() || !trouble.empty()) return;
    const Status closed = (*group)->close(steady_clock().now() + muster::testing::kMustHappen);
    if (!closed.ok()) report("close: " + closed.message());
  });
  return played.load();
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

class CollectiveSuite : public testing::SampledCells<std::tuple<Wire, int>> {};

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
// spec: F15 every dtype; operations that only move bytes take every width; MIN and MAX pass NaN on;
// 16-bit floats round once
// spec: F16 zero-element tensors, one-rank groups
// spec: F19 PREMUL_SUM multiplies each rank's input; AVG: the sum in the order of ranks, then one
// division; integers truncate
// spec: F20 ranks that do not need the list give none
// spec: A1 shared memory off: tcp alone
TEST_P(CollectiveSuite, EveryCellMatchesTheDirectComputation) {
  const auto [wire, ranks] = GetParam();
  const std::uint64_t seed = testing::test_seed();
  std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(wire) * 100 +
                         static_cast<std::uint64_t>(ranks));
  const auto budget = testing::test_budget(20) /
                      static_cast<double>(std::size(kRanks) * std::size(testing::kWiresAndHosts));
  const auto cells = draw_cells(random, ranks, pairs_on_hosts(wire, ranks));
  std::string trouble;
  const std::size_t played = play_all(wire, ranks, cells, budget, trouble);
  ASSERT_TRUE(trouble.empty()) << trouble << "replay with MUSTER_TEST_SEED=" << seed;
  // A short budget still plays cells on every wire with every number of ranks; a full run plays
  // all.
  ASSERT_GE(played, testing::whole_matrices() ? cells.size() : std::size_t{2});
  std::cout << "played " << played << " of " << cells.size() << " cells with seed " << seed << "\n";
}

std::shared_ptr<Communicator> whole_group(const std::shared_ptr<transport::Fabric>& fabric,
                                          int ranks, bool use_region = true) {
  auto group = create_whole_group(fabric, ranks, use_region);
  EXPECT_TRUE(group.ok()) << group.status().message();
  return group.ok() ? *group : nullptr;
}

// A different rank is last in each round; it enters when all others have announced that they are
// about to.
// spec: F13 barrier: nobody leaves before the last has come, over links and over shared memory,
// blocking and started
TEST_P(CollectiveSuite, BarrierHoldsEveryone) {
  const auto [wire, number] = GetParam();
  const int ranks = number;
  for (const bool use_region : {true, false}) {
    std::atomic<int> come{0};
    testing::run_ranks(ranks, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const auto group = whole_group(fabric, ranks, use_region);
      if (group == nullptr) return;
      for (int round = 0; round < 30; ++round) {
        const int before = round * ranks;
        if (round % ranks == rank) {
          while (come.load() < before + ranks - 1) std::this_thread::yield();
        }
        come.fetch_add(1);
        const TimePoint deadline = steady_clock().now() + muster::testing::kMustHappen;
        const Status status = round % 3 == 2
                                  ? group->start(Args{}, deadline)->wait(TimePoint::max())
                                  : group->run(Args{}, deadline);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_GE(come.load(), before + ranks)
            << "rank " << rank << " left the barrier of round " << round << " before all had come";
      }
      const Status closed = group->close(steady_clock().now() + muster::testing::kMustHappen);
      EXPECT_TRUE(closed.ok()) << closed.message();
    });
  }
}

// A one, and from every other rank half of its last place: if every addition rounded, they would
// all be lost (ties to even).
// spec: F15 16-bit floats accumulate in float32 and round once, and once more on each host where
// hosts send each other sums
TEST_P(CollectiveSuite, SixteenBitSumsRoundOnce) {
  const auto [wire, number] = GetParam();
  const int ranks = number;
  const auto pairs = pairs_on_hosts(wire, ranks);
  const Selection used =
      select(*drawn_tuning(0, ranks), Medium::network, ranks, GroupPlacement{.first_ranks = pairs});
  struct Kind {
    DType dtype;
    std::uint16_t one, half_a_place;
  };
  for (const Kind kind :
       {Kind{DType::float16, 0x3c00, 0x1000}, Kind{DType::bfloat16, 0x3f80, 0x3b80}}) {
    testing::run_ranks(ranks, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const auto group = whole_group(fabric, ranks);
      if (group == nullptr) return;
      // (ranks - 1) halves of a place, rounded to even once.
      const int halves = ranks - 1;
      const int places = halves / 2 + (halves % 2 == 1 && halves / 2 % 2 == 1 ? 1 : 0);
      const auto rounded_once = static_cast<std::uint16_t>(kind.one + places);
      // A host's two halves are a place; the first host's one half is lost. A single rank's half is
      // rounded with the sum of all.
      const int of_pairs = ranks / 2 - 1;
      const auto rounded_by_hosts =
          static_cast<std::uint16_t>(kind.one + of_pairs + (ranks % 2 == 1 ? of_pairs % 2 : 0));
      for (const std::size_t count : {std::size_t{1}, std::size_t{3000}, std::size_t{600'000}}) {
        for (const Op op : {Op::all_reduce, Op::reduce}) {
          std::vector<std::uint16_t> in(count, rank == 0 ? kind.one : kind.half_a_place),
              out(count);
          Args args;
          args.op = op;
          args.dtype = kind.dtype;
          args.root = op == Op::reduce ? ranks - 1 : -1;
          args.inputs = {std::as_bytes(std::span(in))};
          args.outputs = {std::as_writable_bytes(std::span(out))};
          const Status status =
              group->run(args, steady_clock().now() + muster::testing::kMustHappen);
          ASSERT_TRUE(status.ok()) << status.message();
          if (op == Op::reduce && rank != ranks - 1) continue;
          const bool by_hosts =
              !pairs.empty() && used.choose(op, count * sizeof(std::uint16_t)) == Algorithm::hosts;
          const std::uint16_t sum = by_hosts ? rounded_by_hosts : rounded_once;
          const auto wrong = std::find_if(out.begin(), out.end(),
                                          [sum](std::uint16_t each) { return each != sum; });
          ASSERT_EQ(wrong, out.end())
              << info(op).name << " of " << name_of(kind.dtype) << " element "
              << wrong - out.begin() << " of " << count << " is " << *wrong << ", expected " << sum;
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveSuite,
                         ::testing::Combine(::testing::ValuesIn(testing::kWiresAndHosts),
                                            ::testing::ValuesIn(kRanks)),
                         [](const auto& cell) {
                           return std::string(testing::wire_name(std::get<0>(cell.param))) + "_" +
                                  std::to_string(std::get<1>(cell.param));
                         });

}  // namespace
}  // namespace muster::collective::suite
