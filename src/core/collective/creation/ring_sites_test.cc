// SPDX-License-Identifier: BSD-3-Clause
// Groups whose hosts stand on two sites, on the simulated network: a ring crosses between the sites
// no more often than it must.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/creation/group_creation.h"
#include "core/collective/select/tuning.h"
#include "testing/sim_network.h"

namespace muster::collective {
namespace {

using testing::SimOptions;
using testing::SimOutcome;
using testing::SimRank;
using testing::SimReport;

constexpr int kRingRanks = 6;
constexpr std::size_t kRingBlock = 100'000;  // numbers; larger than all else that is sent meanwhile
constexpr std::size_t kTellingBlock = kTellingBytes / sizeof(std::int64_t);

bool is_same_site(int rank, int other) { return rank % 2 == other % 2; }

/// By rank: the one that it sent the blocks of a ring to.
using NextRanks = std::array<int, kRingRanks>;

/// A call that lists one piece for each member, or has one.
Args listed(Op op, const std::vector<std::int64_t>& in, std::vector<std::int64_t>& out) {
  Args args;
  args.op = op;
  args.dtype = DType::int64;
  const auto pieces = [&](auto bytes, auto& into) {
    const std::size_t each = bytes.size() / kRingRanks;
    for (int i = 0; i < kRingRanks; ++i)
      into.push_back(bytes.subspan(static_cast<std::size_t>(i) * each, each));
  };
  if (op == Op::all_gather) {
    args.inputs = {std::as_bytes(std::span(in))};
  } else {
    pieces(std::as_bytes(std::span(in)), args.inputs);
  }
  pieces(std::as_writable_bytes(std::span(out)), args.outputs);
  return args;
}

/// Gathers around the ring of the group, and sees where this rank's blocks go.
Status gather_around(Communicator& group, const transport::Fabric& fabric, TimePoint deadline,
                     NextRanks& next) {
  const auto rank = static_cast<std::size_t>(fabric.rank());
  const std::vector<std::int64_t> in(kRingBlock, fabric.rank());
  std::vector<std::int64_t> out(kRingBlock * kRingRanks, -1);
  auto before = fabric.link_figures();
  if (Status done = group.run(listed(Op::all_gather, in, out), deadline); !done) return done;
  for (std::size_t i = 0; i < out.size(); ++i)
    if (out[i] != static_cast<std::int64_t>(i / kRingBlock))
      return Status(Code::internal, "WRONG RESULT");
  for (const auto& [peer, figures] : fabric.link_figures())
    if (figures.sent - before[peer].sent > (kRingRanks - 1) * kRingBlock * sizeof(std::int64_t))
      next[rank] = peer;
  return {};
}

/// How often the ring crosses between the sites; 0 if it is none through all ranks.
int crossings(const NextRanks& next) {
  std::set<int> seen;
  int crossed = 0, rank = 0;
  for (int i = 0; i < kRingRanks; ++i) {
    const int after = next[static_cast<std::size_t>(rank)];
    if (after < 0 || !seen.insert(after).second) return 0;
    crossed += is_same_site(rank, after) ? 0 : 1;
    rank = after;
  }
  return crossed;
}

// spec: X4.order groups that are made once the rates are measured go in the order of these, by
// agreement and by a split
TEST(RingSites, GoByTheRatesThatWereMeasured) {
  SimOptions options;
  options.hosts.resize(kRingRanks);
  std::iota(options.hosts.begin(), options.hosts.end(), 0);
  options.max_delay = std::chrono::microseconds(50);
  options.figures = [](int from, int to) {
    return is_same_site(from, to) ? LinkFigures{.round_trip = std::chrono::microseconds(200),
                                                .bytes_per_s = 125'000'000}
                                  : LinkFigures{.round_trip = std::chrono::milliseconds(100),
                                                .bytes_per_s = 1'250'000};
  };
  const auto tuning = std::make_shared<Tuning>();
  tuning->forced = {{Op::all_gather, Algorithm::ring}};
  NextRanks unknown, used, made, part;
  for (NextRanks* next : {&unknown, &used, &made, &part}) next->fill(-1);

  const SimReport report = testing::run_sim_job(options, [&](SimRank& self) -> Status {
    auto fabric = self.join();
    if (!fabric.ok()) return fabric.status();
    const TimePoint deadline = deadline_after(self.clock(), std::chrono::seconds(100));
    std::vector<int> members(kRingRanks);
    std::iota(members.begin(), members.end(), 0);
    const auto create = [&](const char* name) {
      return Communicator::create(*fabric, members, {.name = name, .tuning = tuning});
    };
    auto first = create("first");
    if (!first.ok()) return first.status();
    if (Status done = gather_around(**first, **fabric, deadline, unknown); !done) return done;
    const auto gather_after = [&](std::size_t sent_to_each, NextRanks& next) -> Status {
      const std::vector<std::int64_t> in(kRingRanks * sent_to_each, 1);
      std::vector<std::int64_t> out(in.size());
      if (Status met = (*first)->run(listed(Op::all_to_all, in, out), deadline); !met) return met;
      auto later = create("later");
      if (!later.ok()) return later.status();
      if (Status done = gather_around(**later, **fabric, deadline, next); !done) return done;
      return (*later)->close(deadline);
    };
    if (Status done = gather_after(1, used); !done) return done;
    if (Status done = gather_after(kTellingBlock, made); !done) return done;

    auto third = Communicator::split(*first, {members}, {.name = "third", .tuning = tuning});
    if (!third.ok()) return third.status();
    if (Status done = gather_around(**third, **fabric, deadline, part); !done) return done;
    for (const auto& group : {*third, *first})
      if (Status closed = group->close(deadline); !closed) return closed;
    return {};
  });
  for (const SimOutcome& each : report.ranks) {
    EXPECT_EQ(each.end, SimOutcome::End::finished);
    EXPECT_TRUE(each.status.ok()) << each.status.message();
  }
  EXPECT_EQ(crossings(unknown), kRingRanks) << "in the order of ranks";
  EXPECT_EQ(crossings(used), kRingRanks) << "most links have hardly carried anything";
  EXPECT_EQ(crossings(made), 2);
  EXPECT_EQ(crossings(part), 2);
}

// spec: X4.order members that have proposals still agree if their ring may have an order
TEST(RingSites, AreNotCommittedWithoutAnOrder) {
  constexpr std::size_t kRanks = 9;  // fewer go around no ring
  SimOptions options;
  options.hosts.resize(kRanks);
  std::iota(options.hosts.begin(), options.hosts.end(), 0);
  const SimReport report = testing::run_sim_job(options, [&](SimRank& self) -> Status {
    auto fabric = self.join();
    if (!fabric.ok()) return fabric.status();
    const TimePoint deadline = deadline_after(self.clock(), std::chrono::seconds(100));
    std::vector<int> members(kRanks);
    std::iota(members.begin(), members.end(), 0);
    auto all = Communicator::create(*fabric, members, {.name = "all"});
    if (!all.ok()) return all.status();
    // The last member alone knows of a long link.
    const auto settled = [&](std::size_t ranks, std::uint32_t strands) {
      std::vector<GroupProposal> proposals(ranks, GroupProposal{.strands = 1});
      proposals.front() = {.channel = 5, .strands = 1, .segment = kNoSegment};
      proposals.back().strands = strands;
      const std::vector<int> first(members.begin(),
                                   members.begin() + static_cast<std::ptrdiff_t>(ranks));
      return Communicator::settle(**fabric, first, proposals);
    };
    if (settled(kRanks, 5).channel != 0) return Status(Code::internal, "no order");
    if (settled(kRanks, 1).channel != 5) return Status(Code::internal, "near: another round");
    const GroupProposal few = settled(kRanks - 1, 5);
    if (few.channel != 5 || few.strands != 5) return Status(Code::internal, "few: no ring");
    return (*all)->close(deadline);
  });
  for (const SimOutcome& each : report.ranks) {
    EXPECT_EQ(each.end, SimOutcome::End::finished);
    EXPECT_TRUE(each.status.ok()) << each.status.message();
  }
}

}  // namespace
}  // namespace muster::collective
