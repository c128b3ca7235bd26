// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/top/top_table.h"

#include <gtest/gtest.h>

#include <chrono>
#include <sstream>
#include <string>
#include <vector>

#include "core/trace/recorder.h"
#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

/// Three live ranks: 2 has not entered a call that 0 and 1 have been in for a minute, 1 the longer.
trace::JobTrace job_behind_rank_2() {
  trace::JobTrace job;
  const std::int64_t now = trace::wall_now_ns();
  for (int rank = 0; rank < 3; ++rank) {
    trace::RankTrace one;
    one.rank = rank;
    one.world_size = 3;
    one.life = trace::Life::running;
    one.groups.push_back({"default", 3, rank, {0, 1, 2}, rank == 2 ? 0u : 1u, 0});
    if (rank < 2) {
      trace::Record call;
      call.ticket = call.sequence = 1;
      call.start_ns = now - std::chrono::nanoseconds(std::chrono::minutes(1 + rank)).count();
      call.name = "barrier";
      one.records.push_back(call);
    }
    job.ranks.push_back(one);
  }
  return job;
}

std::vector<std::string> lines_of_table(const TopStyle& style) {
  std::istringstream text(top_table(job_behind_rank_2(), style));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// spec: V8.ranks top: the rank that is behind comes first if asked, then who has waited longest
TEST(TopTable, SortsByWhoIsLate) {
  const auto by_rank = lines_of_table({});
  ASSERT_EQ(by_rank.size(), 5u);
  EXPECT_TRUE(by_rank[2].starts_with("    0 ")) << by_rank[2];
  const auto late = lines_of_table({.order = TopOrder::late});
  EXPECT_TRUE(late[2].starts_with("    2 ")) << late[2];
  EXPECT_TRUE(late[3].starts_with("    1 ")) << late[3];
  const auto wait = lines_of_table({.order = TopOrder::wait});
  EXPECT_TRUE(wait[4].starts_with("    2 ")) << wait[4];
}

// spec: V8.ranks top: no line is longer than the terminal is wide, and none is cut in a character
TEST(TopTable, FitsTheTerminal) {
  for (const std::string& line : lines_of_table({.columns = 40}))
    EXPECT_LE(line.size(), 40u) << line;
  trace::JobTrace job = job_behind_rank_2();
  for (auto& rank : job.ranks) {
    rank.failures = 1;
    rank.failure = std::string("\xc3\xa4\xc3\xa4\xc3\xa4");
  }
  const std::string text = top_table(job, {.columns = 22});  // "        last error: " and 2 more
  EXPECT_TRUE(contains(text, "error: \xc3\xa4\xc3\xa4\n")) << text;
}

// spec: V8.ranks top: colour says who is behind, and there is none unless asked for
TEST(TopTable, PaintsWhoIsBehind) {
  EXPECT_FALSE(contains(top_table(job_behind_rank_2()), "\033"));
  const auto painted = lines_of_table({.colour = true});
  EXPECT_TRUE(painted[4].starts_with("\033[31m    2 ")) << painted[4];
  EXPECT_TRUE(painted[4].ends_with("\033[0m")) << painted[4];
  EXPECT_TRUE(painted[2].starts_with("    0 ")) << painted[2];
}

// spec: V8.ranks top: a file gets no colour unless it is asked for; other orders are refused
TEST(TopTable, OptionsOfTheCommand) {
  const auto refused = run({"top", "--sort", "age"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "age")) << refused.err;
  const muster::testing::ScratchFolder folder;
  const auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  std::vector<std::string> words = {"top", "--once", "--sort", "late", "--dir", folder.file("run")};
  EXPECT_FALSE(contains(run(words).out, "\033"));
  words.insert(words.end(), {"--color", "always"});
  EXPECT_TRUE(contains(run(words).out, "\033[1m rank"));
}

// spec: V8.ranks top goes on while all ranks wait for the next epoch of their job, shows that one
// once it has begun, and ends with the job
TEST(TopCommand, GoesOnBetweenEpochs) {
  const muster::testing::ScratchFolder folder;
  const std::string run = folder.file("run");
  auto first = trace::Recorder::create({"first epoch", 0, 1, 64, run, "job7"});
  ASSERT_TRUE(first.ok()) << first.status().message();
  Launched top({"top", "--dir", run, "--interval", "0.1"});
  ASSERT_TRUE(top.wait_for_output(" running "));
  first->reset();
  ASSERT_TRUE(top.wait_for_output(" left "));
  auto second = trace::Recorder::create({"second epoch", 0, 1, 64, run, "job7"});
  ASSERT_TRUE(second.ok()) << second.status().message();
  ASSERT_TRUE(top.wait_for_output("second epoch"));
  (*second)->remove();
  const Outcome outcome = top.finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "all is well")) << outcome.out;
}

}  // namespace
}  // namespace muster::cli::testing
