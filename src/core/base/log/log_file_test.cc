// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/log/log_format.h"
#include "core/base/process/temporary_folder.h"

namespace muster {
namespace {

class LogFileTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "log") const { return folder_.path() + "/" + name; }
  static std::string text_of(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  static void put(RotatingLog& file, const std::string& line) {
    EXPECT_EQ(file.write(line), static_cast<ssize_t>(line.size())) << errno;
  }
  std::size_t files() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      count += entry.is_regular_file() ? 1 : 0;
    return count;
  }

  const TemporaryFolder folder_{"muster-test-"};
};

// spec: V6.file a file that is full becomes FILE.1, and the oldest goes; no line is torn or lost
TEST_F(LogFileTest, BeginsAnewWhenItIsFull) {
  RotatingLog file(path(), {.bytes = 100, .kept = 2});
  for (int i = 0; i < 8; ++i) put(file, "line " + std::to_string(i) + std::string(33, '.') + "\n");
  EXPECT_TRUE(text_of(path()).starts_with("line 6")) << text_of(path());
  EXPECT_TRUE(text_of(path("log.1")).starts_with("line 4"));
  EXPECT_TRUE(text_of(path("log.2")).starts_with("line 2"));
  EXPECT_EQ(files(), 3u);
  for (const char* name : {"log", "log.1", "log.2"})
    EXPECT_EQ(text_of(path(name)).size(), 80u) << name;
}

// spec: V6.file a line longer than a file is kept whole
TEST_F(LogFileTest, LongLinesStayWhole) {
  RotatingLog file(path(), {.bytes = 10, .kept = 1});
  put(file, "a line of more than ten bytes\n");
  put(file, "another one of more than ten bytes\n");
  EXPECT_EQ(text_of(path()), "another one of more than ten bytes\n");
  EXPECT_EQ(text_of(path("log.1")), "a line of more than ten bytes\n");
}

// spec: V6.file a file that is there is continued; another process that has renamed it is followed
TEST_F(LogFileTest, SeveralWritersShareAFile) {
  RotatingLog one(path(), {.bytes = 40, .kept = 9}), two(path(), {.bytes = 40, .kept = 9});
  put(one, "one: 0123456789012345\n");
  put(two, "two: 01234567890\n");
  put(one, "one again: 0123456789\n");  // renames
  put(two, "two follows\n");
  EXPECT_EQ(text_of(path("log.1")), "one: 0123456789012345\ntwo: 01234567890\n");
  EXPECT_EQ(text_of(path()), "one again: 0123456789\ntwo follows\n");
}

// spec: V6.file also by a line that would have fitted into the file that was renamed; a deleted
// file is made anew
TEST_F(LogFileTest, NoLineGoesWhereNobodyLooks) {
  RotatingLog one(path(), {.bytes = 40, .kept = 9}), two(path(), {.bytes = 40, .kept = 9});
  put(two, "two: 0123456789\n");
  put(one, "one: 01234567890123456789\n");  // does not fit: renames
  put(two, "short\n");                      // would have fitted
  EXPECT_EQ(text_of(path("log.1")), "two: 0123456789\n");
  EXPECT_TRUE(text_of(path()).ends_with("short\n")) << text_of(path());
  ASSERT_EQ(::unlink(path().c_str()), 0);
  put(two, "anew\n");
  EXPECT_EQ(text_of(path()), "anew\n");
}

// spec: V6.file a file that takes nothing more is told of once, the caller hears it each time, and
// the next line that fits begins at the left
TEST_F(LogFileTest, AFullDiskIsToldOf) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto limit_to = [&](rlim_t bytes) {
    const rlimit limit{bytes, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  };
  std::signal(SIGXFSZ, SIG_IGN);
  ::testing::internal::CaptureStderr();
  RotatingLog file(path(), {});
  const std::string whole = std::string(4089, 'w') + "\n";  // standard error is a file here too
  put(file, whole);
  limit_to(whole.size() + 4);
  EXPECT_EQ(file.write("broken\n"), 4);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(file.write("en\n"), -1);
    EXPECT_EQ(errno, EBADF);
  }
  limit_to(before.rlim_cur);
  put(file, "again\n");
  std::signal(SIGXFSZ, SIG_DFL);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(path()), std::string::npos) << said;
  EXPECT_EQ(said.find("MUSTER_LOG_FILE"), said.rfind("MUSTER_LOG_FILE")) << said;
  EXPECT_EQ(text_of(path()), whole + "brok\nagain\n");
}

// spec: V6.file writers at the same time lose and tear no line
TEST_F(LogFileTest, WritersAtTheSameTimeLoseNothing) {
  constexpr int kWriters = 4, kLines = 2000;
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      RotatingLog file(path(), {.bytes = 4000, .kept = 1000});
      for (int i = 0; i < kLines; ++i)
        put(file, std::to_string(writer) + " " + std::to_string(i) + "\n");
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<std::vector<bool>> seen(kWriters, std::vector<bool>(kLines));
  int lines = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
    std::ifstream file(entry.path());
    for (int writer = -1, line = -1; file >> writer >> line; ++lines)
      seen.at(static_cast<std::size_t>(writer)).at(static_cast<std::size_t>(line)) = true;
  }
  EXPECT_EQ(lines, kWriters * kLines);
  for (const auto& each : seen) EXPECT_EQ(std::count(each.begin(), each.end(), true), kLines);
}

// spec: V6.file %h and %p are the host and the process
TEST_F(LogFileTest, NamesHostAndProcess) {
  RotatingLog file(path("%p-%%-%x"), {});
  put(file, "here\n");
  EXPECT_EQ(text_of(path(std::to_string(::getpid()) + "-%-%x")), "here\n");
}

// spec: V6.file a relative path stays where it was when the program changes its folder before its
// first line
TEST_F(LogFileTest, StaysWhereItWas) {
  const auto before = std::filesystem::current_path();
  ASSERT_TRUE(std::filesystem::create_directories(path("%p/below")));
  std::filesystem::current_path(path("%p"));
  RotatingLog file("log", {});
  std::filesystem::current_path(path("%p/below"));
  put(file, "here\n");
  std::filesystem::current_path(before);
  EXPECT_EQ(text_of(path("%p/log")), "here\n");
}

// spec: V6.file W3 what others could have laid is refused by name; the caller hears that there is
// none
TEST_F(LogFileTest, RefusesLinksAndLooseFiles) {
  const std::string target = path("target");
  std::ofstream(target) << "kept";
  ASSERT_EQ(::symlink(target.c_str(), path("link").c_str()), 0);
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  std::ofstream(path("loose")) << "";
  ASSERT_EQ(::chmod(path("loose").c_str(), 0666), 0);
  ASSERT_EQ(::link(target.c_str(), path("second").c_str()), 0);
  for (const char* name : {"link", "fifo", "loose", "second", "none/log", "."}) {
    ::testing::internal::CaptureStderr();
    RotatingLog file(path(name), {});
    EXPECT_EQ(file.write("line\n"), -1) << name;
    EXPECT_EQ(errno, EBADF);
    EXPECT_EQ(file.write("line\n"), -1);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(path(name)), std::string::npos) << said;
    EXPECT_EQ(said.find("MUSTER_LOG_FILE"), said.rfind("MUSTER_LOG_FILE")) << said;
  }
  EXPECT_EQ(text_of(target), "kept");
}

// spec: V6.format a line as JSON has time, level, host, pid, rank and message, whatever the message
// is
TEST(LogFormat, JsonLinesAreWhole) {
  using log_format::LineForm;
  const auto time = std::chrono::system_clock::time_point(std::chrono::milliseconds(1234));
  const std::string message = "quote \" newline \n bytes \xff\x01 end";
  const std::string text = log_format::line_text(LineForm::json, {time, "info", 3, message});
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  const auto object = nlohmann::json::parse(text);
  EXPECT_EQ(object["time"], "1970-01-01T00:00:01.234Z");
  EXPECT_EQ(object["level"], "info");
  EXPECT_EQ(object["rank"], 3);
  EXPECT_EQ(object["pid"], ::getpid());
  EXPECT_FALSE(object["host"].get<std::string>().empty());
  EXPECT_TRUE(object["message"].get<std::string>().starts_with("quote \" newline \n bytes \uFFFD"));
  EXPECT_FALSE(nlohmann::json::parse(log_format::line_text(LineForm::json, {time, "info", -1, ""}))
                   .contains("rank"));
  const std::string line = log_format::line_text(LineForm::file, {time, "error", 3, "words"});
  EXPECT_TRUE(line.starts_with("[1970-01-01T00:00:01.234Z error ")) << line;
  EXPECT_TRUE(line.ends_with(std::to_string(::getpid()) + " rank 3] words\n")) << line;
}

}  // namespace
}  // namespace muster
