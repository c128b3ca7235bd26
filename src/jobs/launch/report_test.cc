// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "jobs/launch/report.h"
#include "testing/fuzz.h"
#include "testing/scratch_folder.h"

namespace muster::launch {
namespace {

// The error file that torch's @record writes.
constexpr const char* kRecorded =
    R"({"message": {"message": "ValueError: no such file", "extraInfo": )"
    R"({"py_callstack": "Traceback\n  File \"a.py\"", "timestamp": "1"}}})";

// spec: L13 an error file is read: the exception and its traceback
TEST(ErrorFile, OfTorch) {
  const auto error = parse_error_file(kRecorded);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message, "ValueError: no such file");
  EXPECT_EQ(error->stack, "Traceback\n  File \"a.py\"");
  EXPECT_EQ(parse_error_file(R"({"message": "a plain sentence"})")->message, "a plain sentence");
}

// spec: L13.refusal what is no error file says nothing
TEST(ErrorFile, OfSomethingElse) {
  for (const char* text : {"", "{", "[]", "7", "{}", R"({"message": 7})", R"({"message": {}})",
                           R"({"message": {"message": ["x"]}})"})
    EXPECT_FALSE(parse_error_file(text).has_value()) << text;
  EXPECT_FALSE(read_error_file("/nowhere/at/all").has_value());
  muster::testing::Fuzz fuzz(1);
  for (muster::testing::FuzzRun run(2000); run.goes_on();)
    static_cast<void>(parse_error_file(fuzz.damaged(kRecorded)));
}

// spec: L9, J3.traces the report of a node that leaves points to no last calls, unless a rank did
// not end by itself and well
TEST(FailureReport, OfANodeThatLeaves) {
  LauncherState state;
  state.cause = LauncherCause::stopped_by_signal;
  state.stop_signal = SIGTERM;
  state.exit_code = 128 + SIGTERM;
  state.ends.resize(1);
  ReportFacts facts{.command = "muster run", .host = "h", .traces = "/traces"};
  facts.ranks.resize(1);
  facts.workers.resize(1);
  const std::string left = failure_report(state, facts);
  EXPECT_TRUE(left.starts_with("muster run: stopped by SIGTERM\n")) << left;
  EXPECT_EQ(left.find("/traces"), std::string::npos) << left;
  state.ends[0].exit.signal = SIGKILL;
  EXPECT_NE(failure_report(state, facts).find("muster trace --dir /traces"), std::string::npos);
  state.ends.clear();
  EXPECT_NE(failure_report(state, facts).find("muster trace --dir /traces"), std::string::npos);
}

}  // namespace

}  // namespace muster::launch
