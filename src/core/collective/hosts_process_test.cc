// SPDX-License-Identifier: BSD-3-Clause
// Every operation between hosts whose ranks die, whose plug is pulled, or whose network is slow:
// two network namespaces of two ranks each, or of three and one.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/testing/host_layouts.h"
#include "core/collective/testing/suite_cells.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/process_job.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"
#include "testing/seed.h"

namespace muster::collective::suite {
namespace {

using std::chrono::seconds;
constexpr int kRanks = 4;
const std::vector<int> kEven{0, 2}, kUneven{0, 3};  // first ranks of the hosts

class Hosts {
 public:
  /// Call before any thread has started.
  static std::unique_ptr<Hosts> make(const std::vector<int>& first_ranks = kEven) {
    auto net = testing::NetworkNamespaces::create(static_cast<int>(first_ranks.size()));
    EXPECT_TRUE(net.ok()) << net.status().message();
    if (!net.ok()) return nullptr;
    auto hosts = std::make_unique<Hosts>();
    hosts->net = std::move(*net);
    hosts->first_ranks = first_ranks;
    return hosts;
  }
  int host_of(int rank) const { return rank < first_ranks[1] ? 0 : 1; }
  /// In a rank's process.
  Result<testing::ProcessJob> join(int rank) const {
    const int host = host_of(rank);
    if (Status entered = net->enter(host); !entered) return entered;
    testing::ProcessJobOptions options;
    options.rank = rank;
    options.world_size = kRanks;
    options.store_path = folder.file("store");
    options.host_label = "host" + std::to_string(host);
    options.towards = net->address(0);
    return testing::join_process_job(options);
  }

  std::unique_ptr<testing::NetworkNamespaces> net;
  testing::ScratchFolder folder;
  std::vector<int> first_ranks;
};

Cell cell_of(const Hosts& hosts, Op op, std::size_t count, std::uint64_t seed) {
  Cell cell{op, DType::float32, Reduce::sum, count, seed, kRanks};
  cell.hosts = hosts.first_ranks;
  return cell;
}

std::vector<Op> all_operations() {
  std::vector<Op> operations;
  for (int op = 0; op < static_cast<int>(Op::send); ++op)
    if (static_cast<Op>(op) != Op::barrier) operations.push_back(static_cast<Op>(op));
  return operations;
}

/// One call after another until one fails; returns its error text.
std::string play_until_failure(const Hosts& hosts, Op op, int rank, testing::SharedCounter& calls) {
  auto job = hosts.join(rank);
  if (!job.ok()) return "cannot join: " + job.status().message();
  std::string wrong;
  for (std::uint64_t number = 0; wrong.empty(); ++number) {
    Answers answers(cell_of(hosts, op, 200'000, number));
    wrong = Player(answers, rank).play(*job->world);
    calls.add(1);
  }
  return wrong;
}

template <class Break>
std::vector<testing::RankEnd> ends_of(const Hosts& hosts, Op op, Break break_it) {
  testing::SharedCounter calls;
  testing::RankProcesses ranks(
      kRanks, [&](int rank) { return play_until_failure(hosts, op, rank, calls); });
  EXPECT_TRUE(calls.wait_for(3 * kRanks, muster::testing::kMustHappen))
      << info(op).name << " does not get going";
  break_it(ranks);
  return ranks.join(muster::testing::kMustHappen);
}

bool names(const std::string& text, int rank) {
  return text.find("rank " + std::to_string(rank)) != std::string::npos;
}

// spec: F18 a rank of another host is killed during each operation: every other rank names it
TEST(HostsFailure, ADeathIsNamedOnEveryHost) {
  const auto operations = all_operations();
  const auto [first, step] = testing::stride_of_cases();
  for (const auto& first_ranks : {kEven, kUneven}) {
    for (auto i = static_cast<std::size_t>(first); i < operations.size();
         i += static_cast<std::size_t>(step)) {
      const Op op = operations[i];
      const auto hosts = Hosts::make(first_ranks);
      ASSERT_NE(hosts, nullptr);
      const auto ends =
          ends_of(*hosts, op, [](testing::RankProcesses& ranks) { ranks.kill(3, SIGKILL); });
      for (std::size_t rank = 0; rank < 3; ++rank)
        EXPECT_TRUE(names(ends[rank].report, 3))
            << info(op).name << " on " << hosts_text(kRanks, first_ranks) << ", rank " << rank
            << " says: " << ends[rank].report;
    }
  }
}

// spec: F18 the link of a host is pulled during an operation: ranks of both hosts name one beyond
// it
TEST(HostsFailure, APulledLinkIsNamedOnBothSides) {
  auto operations = all_operations();
  std::mt19937_64 random(testing::test_seed());
  std::shuffle(operations.begin(), operations.end(), random);
  if (!testing::long_tests()) operations.resize(2);
  for (const Op op : operations) {
    const auto hosts = Hosts::make();
    ASSERT_NE(hosts, nullptr);
    const auto ends = ends_of(*hosts, op, [&](testing::RankProcesses&) {
      const Status pulled = hosts->net->set_plugged(1, false);
      EXPECT_TRUE(pulled.ok()) << pulled.message();
    });
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      const int beyond = rank < 2 ? 2 : 0;
      EXPECT_TRUE(names(ends[rank].report, beyond) || names(ends[rank].report, beyond + 1))
          << info(op).name << ", rank " << rank << " says: " << ends[rank].report
          << ", MUSTER_TEST_SEED=" << testing::test_seed();
    }
  }
}

void end_right_on_a_slow_host(const std::vector<int>& first_ranks) {
  const auto hosts = Hosts::make(first_ranks);
  ASSERT_NE(hosts, nullptr);
  ASSERT_TRUE(hosts->net->limit(0, "1gbit").ok());
  ASSERT_TRUE(hosts->net->limit(1, "100mbit").ok());
  testing::RankProcesses ranks(kRanks, [&](int rank) -> std::string {
    auto job = hosts->join(rank);
    if (!job.ok()) return "cannot join: " + job.status().message();
    for (const Op op : all_operations()) {
      for (int number = 0; number < std::max(2, testing::test_rounds(6, 6)); ++number) {
        const std::size_t count = number == 0 ? 1000 : 100'003;
        Answers answers(
            cell_of(*hosts, op, count, testing::test_seed() + static_cast<std::uint64_t>(number)));
        const std::string wrong = Player(answers, rank).play(*job->world);
        if (!wrong.empty()) return std::string(info(op).name) + ": " + wrong;
      }
    }
    const Status closed = job->world->close(steady_clock().now() + muster::testing::kMustHappen);
    return closed.ok() ? "right" : closed.message();
  });
  for (const auto& end : ranks.join(muster::testing::kMustHappen)) EXPECT_EQ(end.report, "right");
}

// spec: F18 a host whose link is a tenth as fast as the others' slows calls, and they end right
TEST(HostsFailure, ASlowHostEndsRight) {
  end_right_on_a_slow_host(kEven);
  end_right_on_a_slow_host(kUneven);
}

}  // namespace
}  // namespace muster::collective::suite
