// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/long_waits.h"

#include <gtest/gtest.h>

#include "core/base/log/log.h"
#include "testing/scratch_folder.h"

namespace muster::trace {
namespace {

using std::chrono::seconds;

constexpr std::int64_t kNsOfSecond = 1'000'000'000;

Record call(std::uint64_t ticket, std::int64_t start_s, State state = State::started) {
  Record record;
  record.ticket = ticket;
  record.start_ns = start_s * kNsOfSecond;
  record.state = state;
  return record;
}

// spec: H2 a call that waits is told of after ten seconds, after twenty, after forty; one that has
// ended is not
TEST(LongWaits, AreToldWhenTheyHaveDoubled) {
  WaitReports reports(seconds(10));
  RankTrace mine;
  mine.records = {call(1, 0), call(2, 0, State::completed), call(3, 95, State::queued)};
  std::vector<std::int64_t> told;
  for (std::int64_t second = 0; second < 100; ++second)
    for (const auto* each : reports.due(mine, second * kNsOfSecond))
      told.push_back(100 * static_cast<std::int64_t>(each->ticket) + second);
  EXPECT_EQ(told, (std::vector<std::int64_t>{110, 120, 140, 180}));
  mine.records[0].state = State::completed;
  EXPECT_TRUE(reports.due(mine, 1000 * kNsOfSecond).size() == 1) << "the queued one";
}

// spec: H2 what waits, for how long, and who has not entered the call
TEST(LongWaits, NameWhoIsAwaited) {
  testing::ScratchFolder folder;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (const int rank : {0, 1}) {
    recorders.push_back(*Recorder::create({"a job", rank, 2, 64, folder.file("job")}));
    const auto group = recorders.back()->add_group("default", std::vector<int>{0, 1}, rank);
    const auto ticket =
        recorders.back()->begin(group, {.name = "barrier", .sequence = 1}, steady_clock().now());
    recorders.back()->end(ticket, steady_clock().now());
    if (rank == 0)
      recorders.back()->begin(group, {.name = "all_reduce", .sequence = 2, .bytes = 16},
                              steady_clock().now());
  }
  const auto job = *read_job(recorders[0]->directory());
  const auto& waiting = job.rank(0)->records.back();
  const auto text = describe_wait(waiting, job, 0, waiting.start_ns + 12 * kNsOfSecond);
  EXPECT_EQ(
      text.find(
          "all_reduce #2 on group default has waited for 12 s; rank 1 has not entered this call"),
      0U)
      << text;
}

// spec: V10.stall at the default level a call that waits is reported after a minute, as a warning
// that names who is awaited, and again after two; a shorter wait is not
TEST(LongWaits, OfAMinuteAreReportedByDefault) {
  testing::ScratchFolder folder;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (const int rank : {0, 1}) {
    recorders.push_back(*Recorder::create({"a job", rank, 2, 64, folder.file("job")}));
    const auto group = recorders.back()->add_group("default", std::vector<int>{0, 1}, rank);
    if (rank == 0)
      recorders[0]->begin(group, {.name = "barrier", .sequence = 1}, steady_clock().now());
  }
  const PeerTraces peer_traces(recorders[0], nullptr, {});
  const std::int64_t start = read_trace(recorders[0]->path())->records.back().start_ns;
  const LogLevel before = log_level();
  set_log_level(LogLevel::warning);
  const WaitLimits limits = wait_limits(logs(LogLevel::info));
  EXPECT_EQ(limits.reported, seconds(60));
  EXPECT_LE(limits.between_looks, seconds(10));
  WaitReports reports(limits.reported);
  const auto logged_at = [&](std::int64_t second) {
    ::testing::internal::CaptureStderr();
    log_waits(reports, *recorders[0], peer_traces, 0, start + second * kNsOfSecond);
    return ::testing::internal::GetCapturedStderr();
  };
  // The reader's clock is that of the recorder to less than a second.
  EXPECT_EQ(logged_at(58), "");
  const std::string first = logged_at(62);
  EXPECT_NE(first.find("warning"), std::string::npos) << first;
  EXPECT_NE(first.find("barrier #1 on group default has waited for 6"), std::string::npos) << first;
  EXPECT_NE(first.find("; rank 1 has not entered this call"), std::string::npos) << first;
  EXPECT_EQ(logged_at(118), "");
  EXPECT_NE(logged_at(122).find("barrier #1 on group default has waited"), std::string::npos);
  set_log_level(before);
}

}  // namespace
}  // namespace muster::trace
