// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/call_totals.h"

#include <gtest/gtest.h>

#include <string>

namespace muster::cli {
namespace {

constexpr std::int64_t kTotalsMs = 1'000'000;
constexpr std::int64_t kTotalsStep = 1000 * kTotalsMs;
const CallKind kReduceOf0{0, "default", "all_reduce"}, kReduceOf1{1, "default", "all_reduce"};

/// A job whose ranks make call i at i seconds, each `late` later than the rank before it; a call of
/// rank 0 takes 100 ms, and all end together.
class CallTotalsTest : public ::testing::Test {
 protected:
  CallTotalsTest() {
    for (int rank = 0; rank < 2; ++rank) {
      trace::RankTrace trace;
      trace.path = "rank" + std::to_string(rank);
      trace.rank = rank;
      trace.world_size = 2;
      trace.pid = 100 + rank;
      trace.groups.push_back({"default", 2, rank, {0, 1}, 0, 0});
      job_.ranks.push_back(trace);
    }
  }
  trace::Record& call(int rank, bool ended = true, const std::string& name = "all_reduce") {
    auto& trace = job_.ranks[static_cast<std::size_t>(rank)];
    trace::Record record;
    record.ticket = record.sequence = ++trace.calls;
    record.start_ns = static_cast<std::int64_t>(record.ticket) * kTotalsStep + rank * late_;
    record.end_ns =
        ended ? static_cast<std::int64_t>(record.ticket) * kTotalsStep + 100 * kTotalsMs : 0;
    record.state = ended ? trace::State::completed : trace::State::started;
    record.bytes = 8;
    record.name = name;
    trace.records.push_back(record);
    return trace.records.back();
  }
  void forget(int rank, std::size_t calls) {
    auto& records = job_.ranks[static_cast<std::size_t>(rank)].records;
    records.erase(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(calls));
  }
  CallSums sums(const CallKind& kind) const {
    const auto found = totals_.calls().find(kind);
    return found == totals_.calls().end() ? CallSums{} : found->second;
  }
  LateSums late(int rank) const {
    const auto found = totals_.late().find({rank, "default"});
    return found == totals_.late().end() ? LateSums{} : found->second;
  }

  trace::JobTrace job_;
  std::int64_t late_ = 30 * kTotalsMs;
  CallTotals totals_;
};

// spec: V7 a rank waits for the last one of its node, and moves data from then on
TEST_F(CallTotalsTest, SecondsAreSplitByComparingRanks) {
  for (int i = 0; i < 10; ++i)
    for (const int rank : {0, 1}) call(rank);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 10);
  EXPECT_EQ(sums(kReduceOf0).bytes, 80);
  EXPECT_NEAR(sums(kReduceOf0).waiting, 0.3, 1e-9);
  EXPECT_NEAR(sums(kReduceOf0).moving, 0.7, 1e-9);
  EXPECT_NEAR(sums(kReduceOf1).waiting, 0, 1e-9);
  EXPECT_NEAR(sums(kReduceOf1).moving, 0.7, 1e-9);
  EXPECT_EQ(sums(kReduceOf1).unattributed, 0);
  EXPECT_EQ(late(0).seconds, 0);
  EXPECT_NEAR(late(1).seconds, 0.3, 1e-9);
  EXPECT_EQ(late(1).calls, 10);
}

// spec: V7 a call counts once, and when it has ended
TEST_F(CallTotalsTest, ACallCountsOnceWhenItHasEnded) {
  call(0);
  call(1);
  totals_.add(job_);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 1);
  trace::Record& second = call(0, false);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 1);
  second.end_ns = second.start_ns + kTotalsMs;
  second.state = trace::State::completed;
  totals_.add(job_);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 2);
  EXPECT_EQ(totals_.estimated().at(0), 0);
}

// spec: V7 calls that the ring has forgotten are counted, and called an estimate
TEST_F(CallTotalsTest, ForgottenCallsAreCountedByTheirLike) {
  for (int i = 0; i < 100; ++i)
    for (const int rank : {0, 1}) call(rank, true, i % 2 == 0 ? "all_reduce" : "barrier");
  for (const int rank : {0, 1}) forget(rank, 60);
  totals_.add(job_);
  EXPECT_NEAR(sums(kReduceOf0).calls, 50, 1e-9);
  EXPECT_NEAR(sums({0, "default", "barrier"}).calls, 50, 1e-9);
  EXPECT_NEAR(sums(kReduceOf0).waiting, 50 * 0.03, 1e-9);
  EXPECT_EQ(totals_.estimated().at(0), 60);
}

// spec: V7 if all calls since the last look were forgotten, or none has ended, the next one counts
// them
TEST_F(CallTotalsTest, CallsThatNobodySawWaitForTheNextLook) {
  for (int i = 0; i < 10; ++i) call(0);
  forget(0, 10);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 0);
  call(0);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 11);
  EXPECT_EQ(totals_.estimated().at(0), 10);
}

// spec: V7 what cannot be compared is not called waiting or moving
TEST_F(CallTotalsTest, CallsWithoutTheOthersAreNotSplit) {
  call(0).sequence = 0;  // point-to-point
  call(0);               // rank 1's is not there
  totals_.add(job_);
  EXPECT_NEAR(sums(kReduceOf0).unattributed, 0.2, 1e-9);
  EXPECT_EQ(sums(kReduceOf0).waiting + sums(kReduceOf0).moving, 0);
  EXPECT_EQ(late(0).calls, 0);
}

// spec: V7 groups of one name and other members are not compared
TEST_F(CallTotalsTest, GroupsOfOneNameAreToldApartByMembers) {
  job_.ranks[0].groups[0].members = {0, 2};
  job_.ranks[1].groups[0].members = {1, 3};
  for (const int rank : {0, 1}) call(rank);
  totals_.add(job_);
  EXPECT_NEAR(sums(kReduceOf0).unattributed, 0.1, 1e-9);
  EXPECT_EQ(late(1).calls, 0);
}

// spec: V7 sums go on when a rank starts again, and failures with them
TEST_F(CallTotalsTest, SumsOutliveAProcess) {
  call(0);
  job_.ranks[0].failures = 2;
  totals_.add(job_);
  auto& again = job_.ranks[0];
  again.records.clear();
  again.calls = 0;
  again.failures = 1;
  again.pid = 200;
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 1);
  call(0);
  totals_.add(job_);
  EXPECT_EQ(sums(kReduceOf0).calls, 2);
  EXPECT_EQ(totals_.failures().at(0), 3);
}

}  // namespace
}  // namespace muster::cli
