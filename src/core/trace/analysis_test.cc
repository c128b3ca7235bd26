// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/analysis.h"

#include <gtest/gtest.h>

#include "core/trace/peer_traces.h"

namespace muster::trace {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

/// A job of `count` ranks in one group; every rank has completed `calls` all_reduces, one a second,
/// and is between calls.
JobTrace job_of(int count, std::uint64_t calls) {
  JobTrace job;
  job.directory = "/somewhere";
  for (int rank = 0; rank < count; ++rank) {
    RankTrace trace;
    trace.rank = rank;
    trace.world_size = count;
    trace.life = Life::gone;
    trace.host = "a";
    GroupTrace group{"default", count, rank, {}, calls, calls};
    for (int member = 0; member < count; ++member) group.members.push_back(member);
    trace.groups.push_back(group);
    for (std::uint64_t i = 1; i <= calls; ++i) {
      Record record;
      record.ticket = record.sequence = i;
      record.start_ns = static_cast<std::int64_t>(i) * kSecond;
      record.end_ns = record.start_ns + kSecond / 2;
      record.bytes = 16;
      record.name = "all_reduce";
      record.dtype = "float32";
      record.shape = {4};
      record.dimensions = 1;
      record.state = State::completed;
      trace.records.push_back(record);
    }
    trace.calls = calls;
    job.ranks.push_back(trace);
  }
  return job;
}

void enter(RankTrace& trace, std::uint64_t sequence, State state = State::started) {
  Record record = trace.records.back();
  record.ticket = ++trace.calls;
  record.sequence = sequence;
  record.start_ns = static_cast<std::int64_t>(sequence) * kSecond;
  record.end_ns = state == State::failed ? record.start_ns + kSecond : 0;
  record.state = state;
  trace.groups[0].started = sequence;
  trace.records.push_back(record);
}

TEST(Analysis, NobodyIsBehindBetweenCalls) {
  const auto job = job_of(4, 5);
  EXPECT_TRUE(find_holdups(job).empty());
  EXPECT_NE(summary(job).find("no rank is behind"), std::string::npos);
}

// The news of a member that closes early ends the call before too, on a member that was still in
// it.
TEST(Analysis, NamesWhoWasMissedWhereTheGroupHasFailed) {
  auto job = job_of(4, 5);
  for (const int rank : {0, 1}) enter(job.ranks[static_cast<std::size_t>(rank)], 6, State::failed);
  auto& slow = job.ranks[3];
  slow.records.back().state = State::failed;
  slow.groups[0].completed = 4;
  const auto text = headline(job, find_holdups(job));
  EXPECT_EQ(text.find("rank 2 is behind: ranks 0 and 1 are in call 6 of group 'default'"), 0u)
      << text;
  EXPECT_NE(text.find("rank 2 has not entered it"), std::string::npos) << text;
}

TEST(Analysis, NamesWhoMakesADifferentCall) {
  auto job = job_of(4, 5);
  for (auto& trace : job.ranks) enter(trace, 6, State::failed);
  EXPECT_EQ(find_holdups(job).front().reason, Reason::unfinished);
  auto& other = job.ranks[2].records.back();
  other.name = "broadcast";
  other.peer = 0;
  const auto holdups = find_holdups(job);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].reason, Reason::different);
  EXPECT_EQ(holdups[0].behind, std::vector<int>{2});
  const auto text = headline(job, holdups);
  EXPECT_EQ(text.find("rank 2 makes a different call: ranks 0, 1 and 3 are in call 6 of group "
                      "'default', all_reduce of 16 bytes"),
            0u)
      << text;
  EXPECT_NE(text.find("rank 2 called broadcast of 16 bytes (float32 [4]) as that number"),
            std::string::npos)
      << text;
  // A member that was still in the call before when the group failed.
  auto slow = job;
  slow.ranks[0].records.pop_back();
  slow.ranks[0].records.back().state = State::failed;
  slow.ranks[0].groups[0].started = 5;
  slow.ranks[0].groups[0].completed = 4;
  const auto early = headline(slow, find_holdups(slow));
  EXPECT_EQ(
      early.find("rank 2 makes a different call: ranks 1 and 3 are in call 6 of group 'default'"),
      0u)
      << early;
  // Nothing has failed: two names of one operation.
  for (auto& trace : job.ranks) trace.records.back().state = State::started;
  EXPECT_NE(find_holdups(job).front().reason, Reason::different);
}

TEST(Analysis, WhoHasNotEnteredTheCallIsBehind) {
  auto job = job_of(4, 5);
  for (const int rank : {0, 1, 3}) enter(job.ranks[static_cast<std::size_t>(rank)], 6);
  const auto holdups = find_holdups(job);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].reason, Reason::not_entered);
  EXPECT_EQ(holdups[0].behind, std::vector<int>{2});
  EXPECT_EQ(holdups[0].waiting, (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(holdups[0].sequence, 6u);
  EXPECT_NE(headline(job, holdups)
                .find("rank 2 is behind: ranks 0, 1 and 3 are in call 6 of group 'default', "
                      "all_reduce of 16 bytes"),
            std::string::npos)
      << headline(job, holdups);
}

TEST(Analysis, AFailedCallCountsAsTheOneThatWasWaitedIn) {
  auto job = job_of(3, 5);
  for (const std::size_t rank : {0u, 2u}) enter(job.ranks[rank], 6, State::failed);
  const auto holdups = find_holdups(job);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].behind, std::vector<int>{1});
  // A call with wrong arguments, after which all went on, holds nobody up.
  auto fine = job_of(3, 5);
  fine.ranks[0].records[2].state = State::failed;
  EXPECT_TRUE(find_holdups(fine).empty());
}

TEST(Analysis, WhoDiedOrWasStoppedInTheCallIsBehind) {
  auto killed = job_of(3, 5);
  enter(killed.ranks[0], 6, State::failed);
  enter(killed.ranks[1], 6);
  enter(killed.ranks[2], 6, State::failed);
  auto holdups = find_holdups(killed);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].reason, Reason::gone);
  EXPECT_EQ(holdups[0].behind, std::vector<int>{1});

  auto stopped = job_of(3, 5);
  for (auto& trace : stopped.ranks) {
    enter(trace, 6);
    trace.life = Life::running;
  }
  stopped.ranks[2].life = Life::stopped;
  holdups = find_holdups(stopped);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].reason, Reason::stopped);
  EXPECT_EQ(holdups[0].behind, std::vector<int>{2});
}

// spec: V8.ranks a rank that waits for the next epoch in a process that lives has failed in its
// call, and is neither in it nor gone
TEST(Analysis, ARankThatHasLeftIsNeitherGoneNorInItsCall) {
  auto job = job_of(2, 5);
  enter(job.ranks[0], 6, State::failed);
  job.ranks[0].life = Life::left;
  enter(job.ranks[1], 6);
  job.ranks[1].life = Life::stopped;
  const std::string text = summary(job);
  EXPECT_NE(text.find("rank 0 failed in call 6 of group 'default', "), std::string::npos) << text;
  EXPECT_NE(text.find(" ago, after 1"), std::string::npos) << text;
  EXPECT_EQ(text.find("rank 0 is in call"), std::string::npos) << text;
  EXPECT_EQ(text.find("gone"), std::string::npos) << text;
}

// spec: V8.ranks a rank that died before the call is not only late, if others live
TEST(Analysis, ARankThatDiedBeforeTheCallIsSaidToBeGone) {
  auto job = job_of(3, 5);
  enter(job.ranks[0], 6, State::failed);
  enter(job.ranks[1], 6, State::failed);
  const std::string dead = "rank 2 has not entered it, and its process is gone";
  EXPECT_EQ(summary(job).find(dead), std::string::npos) << "so are all the others'";
  job.ranks[0].life = Life::left;
  EXPECT_NE(summary(job).find(dead), std::string::npos) << summary(job);
  job.ranks[2].life = Life::running;
  EXPECT_EQ(summary(job).find(dead), std::string::npos) << summary(job);
}

// spec: V8.ended after the job's end the report says from when its times count
TEST(Analysis, AReportOfAnEndedJobNamesItsClock) {
  auto job = job_of(2, 5);
  enter(job.ranks[0], 6);
  const std::string note = "the times of calls count back from the last that was traced, ";
  EXPECT_NE(summary(job).find(note), std::string::npos) << summary(job);
  job.ranks[1].life = Life::running;
  EXPECT_EQ(summary(job).find(note), std::string::npos) << summary(job);
}

TEST(Analysis, QueuedCallsBehindTheFirstDoNotMisleadIt) {
  auto job = job_of(2, 5);
  for (const std::uint64_t call : {6u, 7u, 8u}) enter(job.ranks[0], call, State::queued);
  enter(job.ranks[1], 6, State::queued);
  job.ranks[0].life = job.ranks[1].life = Life::running;
  const auto holdups = find_holdups(job);
  ASSERT_EQ(holdups.size(), 1u);
  EXPECT_EQ(holdups[0].sequence, 6u);
  EXPECT_TRUE(holdups[0].behind.empty());
}

TEST(Analysis, TheLargestGapComesFirst) {
  auto job = job_of(2, 5);
  for (auto& trace : job.ranks) trace.groups.push_back({"pair", 2, trace.rank, {0, 1}, 0, 0});
  enter(job.ranks[0], 6);
  auto far = job.ranks[1].records.back();
  far.ticket = ++job.ranks[1].calls;
  far.group = 1;
  far.sequence = 9;
  far.state = State::started;
  far.end_ns = 0;
  job.ranks[1].records.push_back(far);
  job.ranks[1].groups[1].started = 9;
  const auto holdups = find_holdups(job);
  ASSERT_EQ(holdups.size(), 2u);
  EXPECT_EQ(holdups[0].group, "pair");
  EXPECT_EQ(holdups[0].behind, std::vector<int>{0});
  EXPECT_EQ(holdups[1].behind, std::vector<int>{1});
}

TEST(Analysis, RatesCoverTheWindow) {
  auto job = job_of(1, 10);  // half of every second in a call
  auto rates = rates_of(job.ranks[0], 11 * kSecond, 4 * kSecond);
  EXPECT_NEAR(rates.operations, 1, 1e-6);
  EXPECT_NEAR(rates.bytes, 16, 1e-6);
  EXPECT_NEAR(rates.busy, 0.5, 1e-6);
  enter(job.ranks[0], 11);
  rates = rates_of(job.ranks[0], 15 * kSecond, 4 * kSecond);
  EXPECT_NEAR(rates.busy, 1, 1e-6);
  EXPECT_EQ(rates.operations, 0);
}

TEST(PeerReport, WhoHasNotEnteredIsMissingEvenWhereAnotherIsAwaited) {
  auto job = job_of(4, 5);
  for (const int rank : {0, 1, 3}) enter(job.ranks[static_cast<std::size_t>(rank)], 6);
  const std::vector<int> members = {0, 1, 2, 3};
  // Rank 3 waits for rank 1 in a tree; rank 1 waits for rank 2.
  const auto report = report_peers(job, "default", 6, members, 3, {1});
  EXPECT_EQ(report.missing, std::vector<int>{2});
  EXPECT_NE(report.text.find("rank 2 has not entered this call"), std::string::npos) << report.text;
  EXPECT_NE(report.text.find("rank 2 (its process is gone)'s last call there is number 5, "
                             "all_reduce of 16 bytes (float32 [4]), completed"),
            std::string::npos)
      << report.text;
  EXPECT_NE(report.text.find("ranks 0 and 1 have entered it"), std::string::npos) << report.text;
}

TEST(PeerReport, WhereAllHaveEnteredTheAwaitedStay) {
  auto job = job_of(3, 5);
  for (auto& trace : job.ranks) enter(trace, 6);
  const std::vector<int> members = {0, 1, 2};
  EXPECT_EQ(report_peers(job, "default", 6, members, 0, {1}).missing, std::vector<int>{1});
  // Nothing of this rank itself: nothing is concluded.
  EXPECT_EQ(report_peers(JobTrace{}, "default", 6, members, 0, {1}).text, "");
}

TEST(PeerReport, ALargeJobsTextStaysShort) {
  auto job = job_of(64, 5);
  std::vector<int> members;
  for (int rank = 0; rank < 64; ++rank) members.push_back(rank);
  enter(job.ranks[0], 6);
  const auto report = report_peers(job, "default", 6, members, 0, {1});
  EXPECT_EQ(report.missing, std::vector<int>{1});
  EXPECT_LT(report.text.size(), 3000u);
}

TEST(Latest, TravelsAsBytesAndBrokenOnesAreRefused) {
  auto job = job_of(2, 5);
  enter(job.ranks[1], 6);
  const std::string bytes = encode_latest(job.ranks[1]);
  const auto back = decode_latest(bytes);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->rank, 1);
  ASSERT_EQ(back->records.size(), 1u);
  EXPECT_EQ(describe(back->records[0]), "all_reduce of 16 bytes (float32 [4])");
  EXPECT_EQ(back->groups.at(0).started, 6u);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode_latest(bytes.substr(0, length)).has_value());
}

/// A job of two live ranks whose calls take half a second; rank 0 has been in the next one for
/// `waits`.
JobTrace waiting_job(double waits) {
  auto job = job_of(2, 40);
  for (auto& rank : job.ranks) rank.life = Life::running;
  enter(job.ranks[0], 41);
  job.ranks[0].records.back().start_ns = wall_now_ns() - static_cast<std::int64_t>(waits * kSecond);
  return job;
}

// spec: F18 ranks of a job that runs enter a call one after the other: nobody is behind before the
// wait is an unusual one
TEST(Analysis, AUsualWaitMakesNobodyBehind) {
  const auto headline_of = [](const JobTrace& job) { return headline(job, find_holdups(job)); };
  const std::string yet = "no rank is behind yet: rank 0 is in call 41 of group 'default'",
                    behind = "rank 1 is behind: rank 0 is in call 41";
  EXPECT_EQ(headline_of(waiting_job(0.5)).find(yet), 0u) << headline_of(waiting_job(0.5));
  EXPECT_EQ(headline_of(waiting_job(30)).find(behind), 0u) << headline_of(waiting_job(30));

  auto slow = waiting_job(30);
  for (auto& record : slow.ranks[1].records)
    record.start_ns = record.end_ns - 20 * kSecond;  // as its calls before
  EXPECT_EQ(headline_of(slow).find(yet), 0u);
  slow.ranks[1].records.front().start_ns -= 1000 * kSecond;  // long ago
  EXPECT_EQ(headline_of(slow).find(yet), 0u);
  slow.ranks[0].records.back().start_ns -= 60 * kSecond;
  EXPECT_EQ(headline_of(slow).find(behind), 0u);

  for (const Life life : {Life::stopped, Life::gone}) {
    auto job = waiting_job(0.5);
    job.ranks[1].life = life;
    EXPECT_EQ(headline_of(job).find(behind), 0u) << "whoever cannot come is behind at once";
  }
}

// A group that stands still goes before one in which a rank is a moment late, whatever their gaps.
TEST(Analysis, AnUnusualWaitComesFirst) {
  auto job = waiting_job(0.1);
  for (auto& rank : job.ranks) {
    rank.groups.push_back(rank.groups[0]);
    rank.groups.back().name = "other";
  }
  job.ranks[0].groups[0].started = 100;
  job.ranks[0].groups[1].started = 40;
  enter(job.ranks[1], 41);
  job.ranks[1].groups[0].started = 40;
  job.ranks[1].groups[1].started = 41;
  job.ranks[1].records.back().group = 1;
  job.ranks[1].records.back().start_ns = wall_now_ns() - 60 * kSecond;
  EXPECT_EQ(headline(job, find_holdups(job))
                .find("rank 0 is behind: rank 1 is in call 41 of group 'other'"),
            0u)
      << summary(job);
}

}  // namespace
}  // namespace muster::trace
