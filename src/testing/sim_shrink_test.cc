// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on the simulated network in which ranks die while the survivors shrink their group:
// all that are left go on together, or the failure names the dead; never a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/collective/creation/survivors.h"
#include "testing/budget.h"
#include "testing/rank_processes.h"
#include "testing/seed.h"
#include "testing/sim_network.h"

namespace muster::testing {
namespace {

using collective::Communicator;
using collective::Lineage;

constexpr auto kTimeout = std::chrono::seconds(20);
constexpr int kRounds = 40;  // in one group, without a failure

SimOptions draw_options(std::uint64_t seed) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull + 7);
  SimOptions options;
  options.seed = seed;
  const int n = 3 + static_cast<int>(random() % 5);
  const int hosts = 1 + static_cast<int>(random() % 3);
  for (int r = 0; r < n; ++r) options.hosts.push_back(r * hosts / n);
  options.regions = random() % 2 == 0;
  options.encrypted = random() % 4 == 0;
  const int deaths = 1 + static_cast<int>(random() % static_cast<unsigned>(std::min(3, n - 1)));
  std::vector<int> victims(static_cast<std::size_t>(n));
  std::iota(victims.begin(), victims.end(), 0);
  std::shuffle(victims.begin(), victims.end(), random);
  TimePoint at = TimePoint(std::chrono::seconds(1)) + std::chrono::milliseconds(25) +
                 std::chrono::microseconds(random() % 40000);
  for (int i = 0; i < deaths; ++i) {
    SimFault fault;
    fault.rank = victims[static_cast<std::size_t>(i)];
    fault.at = at;
    options.faults.push_back(fault);
    // The next one while the others learn of this, agree, or make the new group.
    at += std::chrono::microseconds(random() % (random() % 2 == 0 ? 2000 : 60000));
  }
  return options;
}

/// The ranks' results for the test. No lock: ranks are fibers of one thread.
struct Tally {
  std::vector<std::vector<int>>
      members;  // of each rank's last group in which it has made its rounds
  int shrunk = 0;
};

Status rounds(SimRank& self, Communicator& group) {
  std::int64_t expected = 0;
  for (const int member : group.members()) expected |= std::int64_t{1} << member;
  for (int round = 0; round < kRounds; ++round) {
    self.compute(std::chrono::milliseconds(2));
    const std::int64_t mine = std::int64_t{1} << self.rank();
    std::int64_t sum = 0;
    collective::Args args;
    args.op = collective::Op::all_reduce;
    args.dtype = DType::int64;
    args.inputs = {std::as_bytes(std::span(&mine, 1))};
    args.outputs = {std::as_writable_bytes(std::span(&sum, 1))};
    if (Status status = group.run(args, deadline_after(self.clock(), kTimeout)); !status)
      return status;
    if (sum != expected) return Status(Code::internal, "WRONG RESULT " + std::to_string(sum));
  }
  return group.close(deadline_after(self.clock(), kTimeout));
}

Status live(SimRank& self, Tally& tally) {
  auto joined = self.join();
  if (!joined) return joined.status().with_context("JOIN");
  std::vector<int> members(static_cast<std::size_t>(self.world_size()));
  std::iota(members.begin(), members.end(), 0);
  collective::CommunicatorOptions options;
  options.timeout = kTimeout;
  options.name = "world";
  Lineage lineage{"world", members, {}, 0};
  auto group = Communicator::create(*joined, members, options);
  Status status = group.ok() ? rounds(self, **group) : group.status();
  while (!status.ok()) {
    if (status.code() == Code::internal || status.code() == Code::timed_out) return status;
    // Some have seen the end of the job before this one died: there is nobody left to go on with.
    if (status.code() == Code::closed) return {};
    options.name = "left";
    auto shrunk = collective::shrink(*joined, lineage, {}, options);
    if (!shrunk) return shrunk.status();
    ++tally.shrunk;
    lineage = shrunk->lineage;
    members.assign(shrunk->communicator->members().begin(), shrunk->communicator->members().end());
    status = rounds(self, *shrunk->communicator);
  }
  tally.members[static_cast<std::size_t>(self.rank())] = members;
  return {};
}

/// The failure of one job, in words; empty if there is none.
std::string trouble(const SimOptions& options, const SimReport& report, const Tally& tally) {
  const auto holds = [&](std::size_t of, std::size_t rank) {
    const auto& members = tally.members[of];
    return std::find(members.begin(), members.end(), static_cast<int>(rank)) != members.end();
  };
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const SimOutcome& outcome = report.ranks[r];
    const std::string who = describe_options(options) + ": rank " + std::to_string(r);
    if (outcome.end == SimOutcome::End::killed) continue;
    if (outcome.end != SimOutcome::End::finished) return who + " hangs\n";
    if (!outcome.status.ok() && outcome.status.message().starts_with("JOIN")) continue;
    if (!outcome.status.ok()) return who + ": " + outcome.status.message() + "\n";
    if (tally.members[r].empty()) continue;
    if (!holds(r, r)) return who + " is not in its own group\n";
    // A rank that has ended well before another's death is not in the last group of those that saw
    // it.
    for (std::size_t other = 0; other < r; ++other) {
      if (holds(r, other) && holds(other, r) && tally.members[r] != tally.members[other])
        return who + " and rank " + std::to_string(other) + " ended in different groups of both\n";
    }
  }
  return {};
}

/// Jobs in a child process, since what they abandon stays: '+' for each that has shrunk a group,
/// then the troubles.
std::string play_batch(std::uint64_t first, int count) {
  std::string shrunk;
  std::string troubles;
  for (int i = 0; i < count; ++i) {
    const SimOptions options = draw_options(first + static_cast<std::uint64_t>(i));
    Tally tally;
    tally.members.resize(options.hosts.size());
    const SimReport report = run_sim_job(options, [&](SimRank& self) { return live(self, tally); });
    if (tally.shrunk > 0) shrunk += '+';
    troubles += trouble(options, report, tally);
  }
  return shrunk + "." + troubles;
}

int shrink_seeds() { return test_rounds(200, 5000) / (kSanitized ? 4 : 1); }

// spec: D7 shrink after a failure, with further deaths while the survivors agree and make their
// group, rank 0's included
TEST(SimShrink, EverySeedGoesOnWithThoseThatAreLeft) {
  constexpr int kBatch = 25;
  std::size_t shrunk = 0;
  for (int done = 0; done < shrink_seeds(); done += kBatch) {
    const std::uint64_t first = test_seed() + 5000000 + static_cast<std::uint64_t>(done);
    const int count = std::min(kBatch, shrink_seeds() - done);
    RankProcesses child(1, [first, count](int) { return play_batch(first, count); });
    const RankEnd end = child.join(std::chrono::minutes(5)).front();
    const std::size_t dot = end.report.find('.');
    ASSERT_NE(dot, std::string::npos)
        << "the batch from seed " << first << " ended with wait status " << end.wait_status;
    ASSERT_EQ(end.report.substr(dot + 1), "");
    shrunk += dot;
  }
  std::printf("%zu of %d jobs shrank\n", shrunk, shrink_seeds());
  EXPECT_GT(shrunk, static_cast<std::size_t>(shrink_seeds() / 2))
      << "most deaths came too late to matter";
}

}  // namespace
}  // namespace muster::testing
