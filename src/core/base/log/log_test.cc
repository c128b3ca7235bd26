// SPDX-License-Identifier: BSD-3-Clause
// Logging while nobody reads standard error, and afterwards.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/log/log_lines.h"
#include "core/base/threads/thread_start.h"
#include "testing/budget.h"

namespace muster {
namespace {

/// Standard error is a pipe that is full to the last byte, as long as this lives.
class FullStandardError {
 public:
  FullStandardError() : before_(::dup(STDERR_FILENO)) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    reader_ = Descriptor(ends[0]);
    ::dup2(ends[1], STDERR_FILENO);
    ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
    const std::string filler(4096, 'x');
    while (::write(ends[1], filler.data(), filler.size()) > 0) {
    }
    while (::write(ends[1], filler.data(), 1) > 0) {
    }
    ::fcntl(ends[1], F_SETFL, 0);
    ::close(ends[1]);
  }
  ~FullStandardError() { restore(); }
  void restore() {
    if (!before_) return;
    ::dup2(before_.get(), STDERR_FILENO);
    before_.reset();
  }
  /// Reads up to the end of the pipe, or until `last` has come; leaves the filler out.
  std::string read(std::string_view last = {}) {
    std::string text;
    for (std::array<char, 4096> some; last.empty() || text.find(last) == std::string::npos;) {
      const ssize_t got = ::read(reader_.get(), some.data(), some.size());
      if (got <= 0) break;
      text.append(some.data(), static_cast<std::size_t>(got));
    }
    return text.substr(std::min(text.size(), text.find_first_not_of('x')));
  }

 private:
  Descriptor before_;
  Descriptor reader_;
};

// spec: H2 log: who logs does not wait for the reader of standard error, and nothing is lost
TEST(Log, WaitsForNobodyWhereStandardErrorIsFull) {
  FullStandardError full;
  for (int i = 0; i < 100; ++i) log(LogLevel::error, "line " + std::to_string(i) + ".");
  const std::string text = full.read("line 99.");
  std::size_t at = 0;
  for (int i = 0; i < 100; ++i) {
    at = text.find("line " + std::to_string(i) + ".", at);
    ASSERT_NE(at, std::string::npos) << i << " in:\n" << text;
  }
  log(LogLevel::error, "and on");
  EXPECT_NE(full.read("and on").find("and on"), std::string::npos);
}

// spec: H2 log: what waits is bounded
TEST(Log, CountsWhatItCannotKeep) {
  FullStandardError full;
  const std::string line(1000, 'y');
  const int lines = 2 * static_cast<int>(log_lines::kMostWaiting / line.size());
  for (int i = 0; i < lines; ++i) log(LogLevel::error, line);
  const std::string text = full.read("were dropped");
  EXPECT_LT(text.size(), log_lines::kMostWaiting + 8192);
  EXPECT_GT(text.size(), log_lines::kMostWaiting / 2);
}

// spec: H2 log: without a thread to write it, a line waits for the next one
TEST(Log, KeepsLinesWhereThereIsNoThreadToWriteThem) {
  FullStandardError full;
  {
    const NoNewThreads refused;
    log(LogLevel::error, "first");
  }
  log(LogLevel::error, "second");
  const std::string text = full.read("second");
  EXPECT_LT(text.find("first"), text.find("second"));
}

// spec: H2 log: a process that ends writes what waits
TEST(Log, EndsWithTheProcessOnlyOnceItIsWritten) {
  FullStandardError full;
  const pid_t child = ::fork();
  if (child == 0) {
    for (int i = 0; i < 100; ++i) log(LogLevel::error, "line " + std::to_string(i) + ".");
    std::exit(0);
  }
  const std::string text = full.read("line 99.");
  EXPECT_NE(text.find("line 0."), std::string::npos) << text;
  EXPECT_NE(text.find("line 99."), std::string::npos) << text;
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// spec: H2 log: a process ends although nobody reads
TEST(Log, DoesNotKeepAProcessThatNobodyReads) {
  FullStandardError full;
  const pid_t child = ::fork();
  if (child == 0) {
    log(LogLevel::error, "unread");
    std::exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// spec: H2 log: a forked child writes its own lines and not its parent's
TEST(Log, AForkedChildDoesNotRepeatItsParentsLines) {
  if (testing::kSanitized)
    GTEST_SKIP() << "a fork may catch a lock of the sanitizer's that another thread holds";
  FullStandardError full;
  log(LogLevel::error, "of the parent");
  const pid_t child = ::fork();
  if (child == 0) {
    log(LogLevel::error, "of the child");
    std::exit(0);
  }
  const std::string text = full.read("of the child");
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  const std::string rest =
      text.find("of the parent") == std::string::npos ? full.read("of the parent") : "";
  log(LogLevel::error, "last");
  const std::string all = text + rest + full.read("last");
  EXPECT_EQ(all.find("of the parent"), all.rfind("of the parent")) << all;
  EXPECT_NE(all.find("of the parent"), std::string::npos) << all;
}

/// Puts levels and environment back.
class DebugLevels : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "MUSTER_LOG_LEVEL"})
      ::unsetenv(name);
    set_debug_level(DebugLevel::OFF);
    set_log_level(LogLevel::warning);
  }
};

// spec: H2 TORCH_DISTRIBUTED_DEBUG with TORCH_CPP_LOG_LEVEL give error, warning, info, debug, trace
TEST_F(DebugLevels, TableOfTheDocuments) {
  for (const auto debug : {DebugLevel::OFF, DebugLevel::INFO, DebugLevel::DETAIL}) {
    EXPECT_EQ(log_level_for("ERROR", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("WARNING", debug), LogLevel::warning);
    EXPECT_EQ(log_level_for("FATAL", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("2", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("nonsense", debug), LogLevel::warning);
  }
  EXPECT_EQ(log_level_for("INFO", DebugLevel::OFF), LogLevel::info);
  EXPECT_EQ(log_level_for("INFO", DebugLevel::INFO), LogLevel::debug);
  EXPECT_EQ(log_level_for("INFO", DebugLevel::DETAIL), LogLevel::trace);
  EXPECT_EQ(log_level_for("info", DebugLevel::DETAIL), LogLevel::trace);
}

// spec: H2 OFF, INFO, DETAIL from the environment; anything else is named
TEST_F(DebugLevels, FromTheEnvironment) {
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::OFF);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "INFO", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::INFO);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "detail", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::DETAIL);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "OFF", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::OFF);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD", 1);
  const Status wrong = debug_level_from_environment().status();
  EXPECT_EQ(wrong.code(), Code::invalid_argument);
  for (const char* part : {"TORCH_DISTRIBUTED_DEBUG", "LOUD", "DETAIL"})
    EXPECT_NE(wrong.message().find(part), std::string::npos) << wrong.message();
}

// spec: H2 set_debug_level, get_debug_level: the log's level follows
TEST_F(DebugLevels, LogFollows) {
  ::setenv("TORCH_CPP_LOG_LEVEL", "INFO", 1);
  set_debug_level(DebugLevel::INFO);
  EXPECT_EQ(get_debug_level(), DebugLevel::INFO);
  EXPECT_EQ(log_level(), LogLevel::debug);
  set_debug_level(DebugLevel::DETAIL);
  EXPECT_EQ(log_level(), LogLevel::trace);
  ::setenv("MUSTER_LOG_LEVEL", "error", 1);
  set_debug_level(DebugLevel::INFO);
  EXPECT_EQ(log_level(), LogLevel::error);
}

}  // namespace
}  // namespace muster
