// SPDX-License-Identifier: BSD-3-Clause
// Many groups with overlapping members at once, and groups created by splitting. Ranks are threads,
// so that ThreadSanitizer sees all of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/collective/communicator.h"
#include "testing/rank_threads.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

using std::chrono::seconds;
using testing::run_ranks;
using testing::Wire;
using Group = std::shared_ptr<Communicator>;

TimePoint later() { return steady_clock().now() + seconds(300); }

CommunicatorOptions named(const std::string& name) {
  CommunicatorOptions options;
  options.name = name;
  options.timeout = seconds(300);
  return options;
}

std::int64_t sum_over(Communicator& group, std::int64_t mine, std::size_t count) {
  const std::vector<std::int64_t> in(count, mine);
  std::vector<std::int64_t> out(count);
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::int64;
  args.inputs = {std::as_bytes(std::span(in))};
  args.outputs = {std::as_writable_bytes(std::span(out))};
  const Status status = group.run(args, later());
  EXPECT_TRUE(status.ok()) << status.message();
  return status.ok() && std::all_of(out.begin(), out.end(),
                                    [&](std::int64_t value) { return value == out.front(); })
             ? out.front()
             : -1;
}

// spec: D3 collectives on groups with overlapping membership at the same time, from several threads
// of every rank, in any order of groups
TEST(Groups, ManyAtOnceFromSeveralThreads) {
  constexpr int kRanks = 8;
  constexpr int kGroups = 20;
  constexpr int kThreads = 4;
  const int rounds = (testing::long_tests() ? 10000 : 400) / kGroups;
  std::mt19937 random(static_cast<unsigned>(testing::test_seed()));
  std::vector<std::vector<int>> members(kGroups);
  for (int i = 0; i < kGroups; ++i) {
    auto& ranks = members[static_cast<std::size_t>(i)];
    for (int rank = 0; rank < kRanks; ++rank)
      if (random() % 2 == 0) ranks.push_back(rank);
    if (ranks.size() < 2) ranks = {i % kRanks, (i + 3) % kRanks};
  }
  for (const Wire wire : {Wire::loopback, Wire::region}) {
    run_ranks(kRanks, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      std::vector<Group> groups(kGroups);
      for (std::size_t i = 0; i < groups.size(); ++i) {
        if (std::find(members[i].begin(), members[i].end(), rank) == members[i].end()) continue;
        auto made = Communicator::create(fabric, members[i], named("group " + std::to_string(i)));
        ASSERT_TRUE(made.ok()) << made.status().message();
        groups[i] = *made;
      }
      const auto work_through = [&](int thread) {
        for (int round = 0; round < rounds; ++round) {
          for (int i = thread; i < kGroups; i += kThreads) {
            const auto at = static_cast<std::size_t>(i);
            if (groups[at] == nullptr) continue;
            std::int64_t expected = 0;
            for (const int member : members[at]) expected |= std::int64_t{1} << member;
            ASSERT_EQ(sum_over(*groups[at], std::int64_t{1} << rank,
                               1 + static_cast<std::size_t>(round * 37 + i) % 300),
                      expected);
          }
        }
      };
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(work_through, thread);
      for (auto& thread : threads) thread.join();
    });
  }
}

// spec: D7 split_group: any number of groups of one division, orders as listed, members of none
TEST(Split, DividesAGroup) {
  for (const Wire wire : testing::kWires) {
    run_ranks(5, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      auto parent = Communicator::create(fabric, {4, 3, 2, 1, 0}, named("parent"));
      ASSERT_TRUE(parent.ok()) << parent.status().message();
      for (int round = 0; round < 3; ++round) {
        auto part = Communicator::split(*parent, {{0, 4}, {3, 1}},
                                        named("part"));  // positions: ranks 4 and 0, ranks 1 and 3
        ASSERT_TRUE(part.ok()) << part.status().message();
        if (rank == 2) {
          EXPECT_EQ(*part, nullptr);
          continue;
        }
        const bool even = rank % 4 == 0;
        EXPECT_EQ((*part)->rank(), even ? (rank == 4 ? 0 : 1) : (rank == 1 ? 0 : 1));
        EXPECT_EQ(sum_over(**part, 1 << rank, 100), even ? 17 : 10);
        EXPECT_TRUE((*part)->close(later()).ok());
      }
      EXPECT_EQ(sum_over(**parent, 1 << rank, 1), 31);
      for (const std::vector<std::vector<int>>& wrong :
           {std::vector<std::vector<int>>{{0, 5}}, {{0}, {0, 1}}, {{}}})
        EXPECT_EQ(Communicator::split(*parent, wrong, named("wrong")).status().code(),
                  Code::invalid_argument);
    });
  }
}

}  // namespace
}  // namespace muster::collective
