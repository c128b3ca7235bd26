// SPDX-License-Identifier: BSD-3-Clause
// The cells of the suite with ranks that are processes: over shared memory, over sockets alone, and
// over both at once. Every process has its own engine, arena and threads, as in a real job. Sampled
// within a budget, with more samples if MUSTER_TEST_LONG=1; and a soak.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/testing/suite_cells.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/process_job.h"
#include "testing/process_usage.h"
#include "testing/rank_processes.h"
#include "testing/sampled_cells.h"
#include "testing/scratch_folder.h"
#include "testing/seed.h"

namespace muster::collective::suite {
namespace {

using std::chrono::seconds;
using Seconds = std::chrono::duration<double>;

/// Synchronizes processes: the first rank opens one block of cells after another until the time is
/// up, and the others follow.
class Referee {
 public:
  /// Called by rank 0 before block `number`, in order.
  bool open(int number, bool go_on) {
    if (!go_on) closed_.add(number + 1);
    opened_.add(1);
    return go_on;
  }
  /// Called by the others; false if the run has ended before that block, or rank 0 is gone.
  bool wait_for(int number) {
    return opened_.wait_for(number + 1, muster::testing::kMustHappen) &&
           (closed_.value() == 0 || number < closed_.value() - 1);
  }

 private:
  testing::SharedCounter opened_, closed_;
};

/// The program of a job of processes.
struct Play {
  Wire wire = Wire::shm;
  int ranks = 2;
  Seconds budget{1};
  std::function<Cell(std::size_t)> cell;  ///< the same on every rank
  std::size_t cells = 0;                  ///< at most this many
  std::size_t at_least = 0;               ///< at least this many, whatever the budget
  /// Runs on each rank after the ranks have met, before block `number` of cells. Returns an error
  /// text, or "".
  std::function<std::string(int rank, int number)> watch;
};
constexpr std::size_t kBlock = 2;

testing::ProcessJobOptions job_options(const Play& play, int rank, const std::string& store_path) {
  testing::ProcessJobOptions options;
  options.rank = rank;
  options.world_size = play.ranks;
  options.store_path = store_path;
  options.shared_memory = play.wire != Wire::tcp;
  options.host_label = testing::host_label(play.wire, rank);
  options.timeout = muster::testing::kMustHappen;
  options.heartbeat_limit = Duration::zero();  // other tests may slow this machine down
  return options;
}

// Returns the number of cells played, or an error text that does not start with a digit.
std::string play_rank(const Play& play, int rank, const std::string& store_path, Referee& referee) {
  auto job = testing::join_process_job(job_options(play, rank, store_path));
  if (!job.ok()) {
    if (rank == 0) referee.open(0, false);
    return "cannot join: " + job.status().message();
  }
  Communicator& world = *job->world;
  const TimePoint end = steady_clock().now() + std::chrono::duration_cast<Duration>(play.budget);
  std::string wrong;
  std::size_t played = 0;
  for (int block = 0; wrong.empty(); ++block) {
    const bool more = played < play.cells;
    const bool go_on =
        rank == 0
            ? referee.open(block, more && (played < play.at_least || steady_clock().now() < end))
            : referee.wait_for(block);
    if (!go_on || !more) break;
    if (play.watch) wrong = play.watch(rank, block);
    for (std::size_t i = 0; i < kBlock && played < play.cells && wrong.empty(); ++i, ++played) {
      Answers answers(play.cell(played));
      wrong = Player(answers, rank).play(world);
      if (!wrong.empty()) wrong = answers.cell().text(play.wire) + ": " + wrong;
    }
  }
  if (!wrong.empty()) {
    if (world.failure().ok()) world.abort("a cell has failed");
    if (rank == 0) referee.open(1 << 20, false);
    return wrong;
  }
  const Status closed = world.close(steady_clock().now() + muster::testing::kMustHappen);
  return closed.ok() ? std::to_string(played) : "close: " + closed.message();
}

/// Runs on processes. Returns the number of cells, 0 on an error.
std::size_t play_on_processes(const Play& play) {
  const testing::ScratchFolder scratch;
  Referee referee;
  testing::RankProcesses ranks(
      play.ranks, [&](int rank) { return play_rank(play, rank, scratch.file("store"), referee); });
  const auto limit =
      std::chrono::duration_cast<Duration>(std::min(play.budget, Seconds(3600))) + seconds(200);
  const auto ends = ranks.join(limit);
  bool right = true;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    const auto& end = ends[rank];
    const bool counted = !end.report.empty() && end.report == ends[0].report &&
                         end.report.find_first_not_of("0123456789") == std::string::npos;
    right = right && counted && end.wait_status == 0;
    EXPECT_TRUE(counted) << "rank " << rank << (end.killed_at_the_limit ? " hangs: " : " says: ")
                         << end.report;
    EXPECT_EQ(end.wait_status, 0) << "rank " << rank;
  }
  return right ? std::stoul(ends[0].report) : 0;
}

constexpr Wire kProcessWires[] = {Wire::shm, Wire::tcp, Wire::mixed, Wire::hosts};
constexpr int kProcessRanks[] = {2, 3, 4, 8};

class CollectiveProcessSuite : public testing::SampledCells<std::tuple<Wire, int>> {};

// spec: F2 broadcast, F3 all_reduce, F4 reduce, F5 all_gather, F7 gather, F8 scatter, F9
// reduce_scatter, F12 all_to_all between processes
// spec: F15 every dtype between processes
// spec: A1 shared memory off: tcp alone, between processes
TEST_P(CollectiveProcessSuite, EveryCellMatchesTheDirectComputation) {
  const auto [wire, ranks] = GetParam();
  const std::uint64_t seed = testing::test_seed();
  std::mt19937_64 random(seed * 1000 + 500 + static_cast<std::uint64_t>(wire) * 100 +
                         static_cast<std::uint64_t>(ranks));
  const auto cells = draw_cells(random, ranks, pairs_on_hosts(wire, ranks));
  Play play;
  play.wire = wire;
  play.ranks = ranks;
  play.budget = testing::test_budget(5, 240) /
                static_cast<double>(std::size(kProcessRanks) * std::size(kProcessWires));
  play.cell = [&](std::size_t number) { return cells[number]; };
  play.cells = cells.size();
  const std::size_t played = play_on_processes(play);
  ASSERT_GE(played, std::size_t{2}) << "replay with MUSTER_TEST_SEED=" << seed;
  std::cout << "played " << played << " of " << cells.size() << " cells with seed " << seed << "\n";
}

std::string pass_barriers(const testing::ProcessJobOptions& options, testing::SharedCounter& come) {
  auto job = testing::join_process_job(options);
  if (!job.ok()) return "cannot join: " + job.status().message();
  const int ranks = options.world_size;
  for (int round = 0; round < 20; ++round) {
    const int before = round * ranks;
    if (round % ranks == options.rank &&
        !come.wait_for(before + ranks - 1, muster::testing::kMustHappen))
      return "the others did not come";
    come.add(1);
    const Status status =
        job->world->run(Args{}, steady_clock().now() + muster::testing::kMustHappen);
    if (!status) return status.message();
    if (come.value() < before + ranks)
      return "left the barrier of round " + std::to_string(round) + " before all had come";
  }
  const Status closed = job->world->close(steady_clock().now() + muster::testing::kMustHappen);
  return closed.ok() ? "done" : closed.message();
}

// spec: F13 barrier between processes: nobody leaves before the last has come, with shared memory
// and over links alone
TEST_P(CollectiveProcessSuite, BarrierHoldsEveryone) {
  Play play;
  std::tie(play.wire, play.ranks) = GetParam();
  const testing::ScratchFolder scratch;
  testing::SharedCounter come;
  testing::RankProcesses ranks(play.ranks, [&](int rank) {
    return pass_barriers(job_options(play, rank, scratch.file("store")), come);
  });
  for (const auto& end : ranks.join(muster::testing::kMustHappen)) EXPECT_EQ(end.report, "done");
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveProcessSuite,
                         ::testing::Combine(::testing::ValuesIn(kProcessWires),
                                            ::testing::ValuesIn(kProcessRanks)),
                         [](const auto& cell) {
                           return std::string(testing::wire_name(std::get<0>(cell.param))) + "_" +
                                  std::to_string(std::get<1>(cell.param));
                         });

// The first blocks of a soak play every operation at its largest size, so that all kept memory is
// allocated.
constexpr int kWarm = 9;

/// A rank's resources after a warm-up, and their growth since then.
class Ledger {
 public:
  explicit Ledger(Seconds warm_up) : warm_up_(std::chrono::duration_cast<Duration>(warm_up)) {}

  std::string watch(int block) {
    const TimePoint now = steady_clock().now();
    if (block == 0) warm_from_ = now + warm_up_;
    if (block < kWarm || now < warm_from_) return "";
    if (descriptors_ < 0) {
      descriptors_ = testing::open_descriptors();
      memory_ = testing::memory_in_use();
    }
    return block % 16 == 0 ? growth() : "";
  }

 private:
  static constexpr std::size_t kMemoryLimit = std::size_t{8} << 20;

  std::string growth() const {
    const int descriptors = testing::open_descriptors();
    if (descriptors != descriptors_)
      return std::to_string(descriptors_) + " descriptors became " + std::to_string(descriptors);
    if (!testing::long_tests() || !testing::kMemoryTells)
      return "";  // a short run does not use everything once
    const auto memory = testing::memory_in_use();
    if (memory.own > memory_.own + kMemoryLimit || memory.shared > memory_.shared + kMemoryLimit) {
      return "memory grew from " + std::to_string(memory_.own) + " bytes of its own and " +
             std::to_string(memory_.shared) + " shared to " + std::to_string(memory.own) + " and " +
             std::to_string(memory.shared);
    }
    return "";
  }

  const Duration warm_up_;
  TimePoint warm_from_{};
  int descriptors_ = -1;
  testing::MemoryInUse memory_;
};

class CollectiveSoak : public ::testing::TestWithParam<Wire> {};

// Random calls of random sizes: for a minute in long runs, for seconds otherwise.
// spec: F15 F16 long runs leave nothing behind: memory and descriptors stay what they were
TEST_P(CollectiveSoak, MemoryAndDescriptorsStayFlat) {
  const std::uint64_t seed = testing::test_seed();
  constexpr int kSoakRanks = 4;
  const auto kinds = all_kinds();
  Play play;
  play.wire = GetParam();
  play.ranks = kSoakRanks;
  play.budget = testing::long_tests() ? Seconds(60) : Seconds(1);
  play.cells = std::size_t{1} << 40;
  play.at_least = (kWarm + 20) * kBlock;
  play.cell = [&](std::size_t number) {
    std::mt19937_64 random(seed * 1000003 + number);
    Kind kind = kinds[random() % kinds.size()];
    std::size_t bytes = std::size_t{1} << random() % 19;
    bytes += random() % bytes;
    if (number < kWarm * kBlock) {
      bytes = testing::long_tests() ? std::size_t{1} << 19 : std::size_t{1} << 17;
      kind = {static_cast<Op>(number % static_cast<std::size_t>(Op::send)), DType::float32,
              Reduce::sum};
    }
    return Cell{kind.op,  kind.dtype, kind.reduce, bytes / size_of(kind.dtype),
                random(), kSoakRanks};
  };
  Ledger ledger(play.budget /
                (testing::long_tests() ? 3 : 1000));  // each forked process has its own
  play.watch = [&](int, int block) { return ledger.watch(block); };
  const std::size_t played = play_on_processes(play);
  ASSERT_GE(played, std::size_t{2}) << "replay with MUSTER_TEST_SEED=" << seed;
  std::cout << "played " << played << " calls with seed " << seed << "\n";
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveSoak, ::testing::Values(Wire::shm, Wire::tcp),
                         [](const auto& wire) {
                           return std::string(testing::wire_name(wire.param));
                         });

}  // namespace
}  // namespace muster::collective::suite
