// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_queue.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

// spec: V6.python lines reach the thread that takes them, with level and rank, and only it
TEST(LogQueue, HandsLinesOver) {
  ::testing::internal::CaptureStderr();
  const int queue = begin_log_queue();
  set_log_rank(3);
  log(LogLevel::error, "first");
  set_log_rank(-1);
  log(LogLevel::warning, "second");
  log(LogLevel::trace, "below the level");
  const auto records = take_log_records(queue);
  end_log_queue();
  log(LogLevel::error, "afterwards");
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].message, "first");
  EXPECT_EQ(records[0].level, LogLevel::error);
  EXPECT_EQ(records[0].rank, 3);
  EXPECT_EQ(records[1].message, "second");
  EXPECT_EQ(records[1].rank, -1);
  EXPECT_GT(records[0].time, 1e9);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("first"), std::string::npos) << said;
  EXPECT_NE(said.find("afterwards"), std::string::npos) << said;
}

// spec: V6.python what waits at the end is still taken, then the taker hears of the end
TEST(LogQueue, EndsWithWhatWaits) {
  const int queue = begin_log_queue();
  log(LogLevel::error, "last words");
  end_log_queue();
  EXPECT_EQ(take_log_records(queue).size(), 1u);
  EXPECT_TRUE(take_log_records(queue).empty());
  const int second = begin_log_queue();
  std::thread taker([=] { EXPECT_TRUE(take_log_records(second).empty()); });
  end_log_queue();
  taker.join();
}

// spec: V6.python a queue that nobody takes from is bounded, and says what it dropped
TEST(LogQueue, CountsWhatDoesNotFit) {
  const int queue = begin_log_queue();
  for (int i = 0; i < 10'100; ++i) log(LogLevel::error, "line");
  const auto records = take_log_records(queue);
  end_log_queue();
  ASSERT_EQ(records.size(), 10'001u);
  EXPECT_TRUE(records.back().message.starts_with("100 lines")) << records.back().message;
}

// spec: V6.python and its bytes are, too: a report with stacks is long
TEST(LogQueue, CountsLongLinesThatDoNotFit) {
  const int queue = begin_log_queue();
  const std::string report(std::size_t{1} << 20, 'x');
  for (int i = 0; i < 10; ++i) log(LogLevel::error, report);
  const auto records = take_log_records(queue);
  log(LogLevel::error, report);  // there is room again
  EXPECT_EQ(take_log_records(queue).size(), 1u);
  end_log_queue();
  ASSERT_EQ(records.size(), 9u);
  EXPECT_TRUE(records.back().message.starts_with("2 lines")) << records.back().message;
}

// spec: V6.python a forked child writes its lines itself
TEST(LogQueue, AForkedChildHasNone) {
  const int queue = begin_log_queue();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool none = take_log_records(queue).empty();
    log(LogLevel::error, "of the child");
    ::_exit(none ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  log(LogLevel::error, "of the parent");
  const auto records = take_log_records(queue);
  end_log_queue();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].message, "of the parent");
}

// spec: V6.python who takes from an earlier queue gets its lines, and none of the next one's
TEST(LogQueue, QueuesAreToldApart) {
  const int first = begin_log_queue();
  log(LogLevel::error, "of the first");
  const int second = begin_log_queue();
  log(LogLevel::error, "of the second");
  end_log_queue();
  EXPECT_EQ(take_log_records(first).at(0).message, "of the first");
  EXPECT_TRUE(take_log_records(first).empty());
  EXPECT_EQ(take_log_records(second).at(0).message, "of the second");
}

}  // namespace
}  // namespace muster
