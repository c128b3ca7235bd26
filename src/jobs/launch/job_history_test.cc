// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "jobs/launch/job_history.h"
#include "jobs/launch/options.h"

namespace muster::launch {
namespace {

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::bad_alloc();
    from.reset(ends[0]);
    to.reset(ends[1]);
  }
  Descriptor from, to;
};

EventLog log_to(Descriptor descriptor) {
  return EventLog::to(std::move(descriptor), "a test's pipe", "job", "host");
}

// spec: L13.events one JSON object a line, in the order of the events
TEST(EventLog, WritesLinesInOrder) {
  Pipe pipe;
  {
    EventLog log = log_to(std::move(pipe.to));
    log.write("first", {{"rank", std::int64_t{3}}, {"what", std::string("a \"word\"\n\xff")}});
    log.write("second", {});
  }
  std::string text(4096, '\0');
  text.resize(static_cast<std::size_t>(::read(pipe.from.get(), text.data(), text.size())));
  std::istringstream lines(text);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["event"], "first");
  EXPECT_EQ(first["job"], "job");
  EXPECT_EQ(first["host"], "host");
  EXPECT_EQ(first["rank"], 3);
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(nlohmann::json::parse(line)["event"], "second");
}

// spec: L13.events a reader that stands still holds nobody up: what does not fit is dropped, and
// counted where it is missing
TEST(EventLog, CountsWhatItDrops) {
  constexpr std::int64_t kLines = 20'000;
  Pipe pipe;
  std::optional<EventLog> log(log_to(std::move(pipe.to)));
  const std::string text(200, 'x');
  for (std::int64_t i = 0; i < kLines; ++i) log->write("line", {{"number", i}, {"text", text}});
  std::string read;
  char bytes[4096];
  std::int64_t written = 0, dropped = 0;
  while (written + dropped < kLines) {
    const ssize_t got = ::read(pipe.from.get(), bytes, sizeof bytes);
    ASSERT_GT(got, 0) << written << " lines, " << dropped << " dropped";
    read.append(bytes, static_cast<std::size_t>(got));
    for (std::size_t end = read.find('\n'); end != std::string::npos; end = read.find('\n')) {
      const auto line = nlohmann::json::parse(read.substr(0, end));
      read.erase(0, end + 1);
      if (line["event"] == "events_dropped") {
        dropped += line["count"].get<std::int64_t>();
      } else {
        EXPECT_EQ(line["number"], written + dropped);
        ++written;
      }
    }
  }
  EXPECT_GT(dropped, 0);
  EXPECT_GT(written, 1000);
}

// spec: L13.events a log whose reader never comes lets the launcher end, and is told
TEST(EventLog, EndsWithoutAReader) {
  const Pipe pipe;
  ::testing::internal::CaptureStderr();
  {
    EventLog log = log_to(Descriptor(::fcntl(pipe.to.get(), F_DUPFD_CLOEXEC, 3)));
    for (int i = 0; i < 1000; ++i) log.write("line", {{"text", std::string(200, 'x')}});
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("events of the job were not written to a test's pipe"), std::string::npos)
      << said;
}

// spec: L13.events a full disk is said once, by name, and what it did not take at the end
TEST(EventLog, AFullDiskIsSaid) {
  ::testing::internal::CaptureStderr();
  {
    EventLog log = log_to(Descriptor(::open("/dev/full", O_WRONLY | O_CLOEXEC)));
    log.write("first", {});
    log.write("second", {});
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string once = "cannot be written to a test's pipe: no space left";
  const std::size_t found = said.find(once);
  EXPECT_NE(found, std::string::npos) << said;
  EXPECT_EQ(said.find(once, found + 1), std::string::npos) << said;
  EXPECT_NE(said.find("2 events of the job were not written"), std::string::npos) << said;
}

// spec: L13.events, L14.node that the job stands still for its state, for whom, and until when
TEST(JobHistory, WritesForWhomTheJobWaits) {
  const TemporaryFolder folder("muster-history-test-");
  const std::string path = folder.path() + "/events";
  {
    RunOptions options;
    options.events = path;
    JobHistory history;
    const Status opened = history.open(options, "job", "host");
    ASSERT_TRUE(opened.ok()) << opened.message();
    history.wait({7, {1, 3}, std::chrono::minutes(1), "two nodes fell silent"});
    history.wait({8, {1}, Duration::max(), "for ever"});
  }
  std::ifstream lines(path);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["event"], "waits_for_state");
  EXPECT_EQ(first["epoch"], 7);
  EXPECT_EQ(first["nodes"], "1, 3");
  EXPECT_EQ(first["what"], "two nodes fell silent");
  EXPECT_GT(first["until"].get<std::string>(), first["time"].get<std::string>());
  ASSERT_TRUE(std::getline(lines, line));
  const auto second = nlohmann::json::parse(line);
  EXPECT_GT(second["until"].get<std::string>(), second["time"].get<std::string>());
}

}  // namespace

}  // namespace muster::launch
