// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/recorder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <thread>

#include "core/base/process/process_start.h"
#include "core/trace/analysis.h"
#include "core/trace/reader.h"
#include "core/trace/run_directory.h"
#include "testing/scratch_folder.h"

namespace muster::trace {
namespace {

namespace fs = std::filesystem;

class RecorderTest : public ::testing::Test {
 protected:
  RecorderTest() { fs::create_directory(base_); }

  std::shared_ptr<Recorder> make(const std::string& job = "a job", int rank = 0,
                                 std::uint32_t entries = 64) {
    auto recorder = Recorder::create({job, rank, 4, entries, base_});
    EXPECT_TRUE(recorder.ok()) << recorder.status().message();
    return *recorder;
  }
  static TimePoint now() { return steady_clock().now(); }
  static RankTrace read(const std::string& path) {
    auto trace = read_trace(path);
    EXPECT_TRUE(trace.ok()) << trace.status().message();
    return trace.ok() ? *trace : RankTrace{};
  }

  testing::ScratchFolder folder_;
  const std::string base_ = folder_.file("run");
};

const std::vector<int> kWorld = {0, 1, 2, 3};

TEST_F(RecorderTest, ACallIsReadBackAsItWasMade) {
  const auto recorder = make();
  const auto world = recorder->add_group("default", kWorld, 0);
  const std::int64_t shape[] = {2, 3};
  const auto begun = wall_now_ns();
  const auto ticket = recorder->begin(world,
                                      {.name = "broadcast",
                                       .sequence = 1,
                                       .bytes = 24,
                                       .dtype = static_cast<std::uint8_t>(DType::float32),
                                       .shape = shape,
                                       .peer = 3},
                                      now());
  recorder->begin(world, {.name = "isend", .bytes = 8, .peer = 2, .tag = 7, .async = true}, now());
  auto trace = read(recorder->path());
  ASSERT_EQ(trace.records.size(), 2u);
  const auto& call = trace.records[0];
  EXPECT_EQ(call.name, "broadcast");
  EXPECT_EQ(call.sequence, 1u);
  EXPECT_EQ(call.bytes, 24u);
  EXPECT_EQ(call.dtype, "float32");
  EXPECT_EQ(call.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(call.peer, 3);
  EXPECT_EQ(call.state, State::started);
  EXPECT_EQ(call.thread, static_cast<std::uint32_t>(::gettid()));
  EXPECT_NEAR(static_cast<double>(call.start_ns - begun), 0, 60e9);
  EXPECT_EQ(trace.records[1].state, State::queued);
  EXPECT_EQ(trace.records[1].tag, 7);
  EXPECT_EQ(trace.life, Life::running);
  EXPECT_EQ(trace.pid, ::getpid());
  EXPECT_EQ(trace.groups.at(0).started, 1u);
  EXPECT_EQ(trace.groups.at(0).completed, 0u);
  EXPECT_EQ(trace.groups.at(0).members, kWorld);

  recorder->end(ticket, now());
  trace = read(recorder->path());
  EXPECT_EQ(trace.records[0].state, State::completed);
  EXPECT_GE(trace.records[0].end_ns, trace.records[0].start_ns);
  EXPECT_EQ(trace.groups.at(0).completed, 1u);
}

TEST_F(RecorderTest, AFailureKeepsItsText) {
  const auto recorder = make();
  const auto ticket = recorder->begin(recorder->add_group("default", kWorld, 0),
                                      {.name = "barrier", .sequence = 1}, now());
  recorder->fail(ticket, "rank 3 is gone", now());
  const auto trace = read(recorder->path());
  EXPECT_EQ(trace.records.at(0).state, State::failed);
  EXPECT_EQ(trace.failure, "rank 3 is gone");
  EXPECT_EQ(trace.failures, 1u);
  EXPECT_EQ(trace.groups.at(0).completed, 0u);
}

TEST_F(RecorderTest, TheRingKeepsTheLatestCalls) {
  const auto recorder = make("a job", 0, 8);
  const auto world = recorder->add_group("default", kWorld, 0);
  std::vector<Ticket> tickets;
  for (std::uint64_t i = 1; i <= 20; ++i)
    tickets.push_back(recorder->begin(world, {.name = "barrier", .sequence = i}, now()));
  recorder->end(tickets.front(), now());  // its slot is another's by now
  const auto trace = read(recorder->path());
  ASSERT_EQ(trace.records.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(trace.records[i].sequence, 13 + i);
    EXPECT_EQ(trace.records[i].state, State::started);
  }
  EXPECT_EQ(trace.calls, 20u);
}

// Readers look while writers lap each other: what is not torn must be one call's, whole.
TEST_F(RecorderTest, ReadersNeverSeeHalfACall) {
  const auto recorder = make("a job", 0, 16);
  const auto world = recorder->add_group("default", kWorld, 0);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 3; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t i = static_cast<std::uint64_t>(writer) + 1; !stop.load(); i += 3) {
        const auto length = static_cast<std::int64_t>(i);
        const auto ticket = recorder->begin(
            world,
            {.name = "all_reduce", .sequence = i, .bytes = i, .shape = {&length, 1}, .tag = length},
            TimePoint(Duration(i)));
        recorder->end(ticket, TimePoint(Duration(2 * i)));
      }
    });
  }
  std::size_t seen = 0;
  for (int look = 0; look < 200 || seen == 0; ++look) {
    const auto trace = read(recorder->path());
    for (const auto& record : trace.records) {
      ++seen;
      ASSERT_EQ(record.bytes, record.sequence);
      ASSERT_EQ(record.shape,
                std::vector<std::int64_t>{static_cast<std::int64_t>(record.sequence)});
      ASSERT_EQ(record.tag, static_cast<std::int64_t>(record.sequence));
      if (record.state == State::completed) {
        ASSERT_EQ(record.end_ns - record.start_ns, static_cast<std::int64_t>(record.sequence));
      }
    }
  }
  stop = true;
  for (auto& writer : writers) writer.join();
}

TEST_F(RecorderTest, ItOutlivesAKilledProcess) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto recorder = Recorder::create({"a job", 2, 4, 64, base_});
    if (!recorder) ::_exit(1);
    const auto world = (*recorder)->add_group("default", kWorld, 2);
    (*recorder)->begin(world, {.name = "all_reduce", .sequence = 1, .bytes = 16},
                       steady_clock().now());
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string path = base_ + "/" + job_folder("a job") + "/rank2.trace";
  EXPECT_EQ(read(path).life, Life::running);
  ::kill(child, SIGSTOP);
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  EXPECT_EQ(read(path).life, Life::stopped);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  const auto trace = read(path);
  EXPECT_EQ(trace.life, Life::gone);
  ASSERT_EQ(trace.records.size(), 1u);
  EXPECT_EQ(trace.records[0].name, "all_reduce");
  EXPECT_TRUE(trace.records[0].under_way());
  const auto found = find_job_of(base_, child);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, base_ + "/" + job_folder("a job"));
  EXPECT_FALSE(find_job_of(base_, ::getpid()).ok());
  ::close(ready[0]);
  ::close(ready[1]);
}

// spec: V8.ranks a process that has closed its trace without removing it has left; it is not gone
TEST_F(RecorderTest, AProcessThatClosedItsTraceHasLeft) {
  auto recorder = make();
  const std::string path = recorder->path();
  EXPECT_EQ(read(path).life, Life::running);
  recorder.reset();
  const auto trace = read(path);
  EXPECT_EQ(trace.life, Life::left);
  EXPECT_EQ(std::string(name_of(trace.life)), "left");
  EXPECT_FALSE(is_open(trace.life));
  EXPECT_TRUE(live_jobs_but(base_, "").empty());
}

TEST_F(RecorderTest, AProcessThatHasEndedIsGone) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto recorder = make();
    const std::string path = recorder->path();
    ::_exit(::write(ends[1], path.data(), path.size()) == std::ssize(path) ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  ASSERT_EQ(WEXITSTATUS(state), 0);
  std::array<char, 4096> path{};
  ASSERT_GT(::read(ends[0], path.data(), path.size() - 1), 0);
  EXPECT_EQ(read(path.data()).life, Life::gone);
  ::close(ends[0]);
  ::close(ends[1]);
}

/// Overwrites a number of a trace's header.
template <class Number>
void put_in_header(const std::string& path, std::size_t offset, Number number) {
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(offset))
      .write(reinterpret_cast<const char*>(&number), sizeof number);
}

// spec: V8.ranks a process of another pid namespace is not the one that has its number here: it
// neither lives, nor stands still, nor is found by that number
TEST_F(RecorderTest, TheWritersNumberMeansNothingInAnotherPidNamespace) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  ASSERT_GT(child, 0);
  const auto start = process_start(child);
  ASSERT_TRUE(start);
  ::kill(child, SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  auto recorder = make();
  const std::string path = recorder->path();
  put_in_header(path, offsetof(FileHeader, pid), std::int64_t{child});
  put_in_header(path, offsetof(FileHeader, pid_start), *start);
  EXPECT_EQ(read(path).life, Life::stopped) << "its own namespace";
  EXPECT_TRUE(find_job_of(base_, child));
  put_in_header(path, offsetof(FileHeader, pid_namespace), namespace_inode("pid") + 1);
  EXPECT_EQ(read(path).life, Life::running);
  EXPECT_FALSE(find_job_of(base_, child));
  recorder.reset();
  EXPECT_EQ(read(path).life, Life::gone);
  put_in_header(path, offsetof(FileHeader, pid_namespace), namespace_inode("pid"));
  EXPECT_EQ(read(path).life, Life::left) << "its own namespace";
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
}

// spec: V8.ranks nor is one of another host, whose first pid namespace has this one's number
TEST_F(RecorderTest, TheWritersNumberMeansNothingOnAnotherHost) {
  const auto recorder = make();
  EXPECT_TRUE(find_job_of(base_, ::getpid()));
  put_in_header(recorder->path(), offsetof(FileHeader, boot), '?');
  EXPECT_FALSE(find_job_of(base_, ::getpid()));
}

// spec: V8.ranks a process that got the writer's number later is not the writer
TEST_F(RecorderTest, ALaterProcessWithTheWritersNumberIsNotTheWriter) {
  auto recorder = make();
  const std::string path = recorder->path();
  const std::uint64_t start = process_start(::getpid()).value();
  recorder.reset();
  EXPECT_EQ(read(path).life, Life::left);
  put_in_header(path, offsetof(FileHeader, pid_start), start - 1);
  EXPECT_EQ(read(path).life, Life::gone);
}

TEST_F(RecorderTest, AForkedChildWritesNothing) {
  const auto recorder = make();
  const auto world = recorder->add_group("default", kWorld, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    recorder->begin(world, {.name = "barrier", .sequence = 1}, steady_clock().now());
    recorder->add_group("another", kWorld, 0);
    recorder->remove();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const auto trace = read(recorder->path());
  EXPECT_TRUE(trace.records.empty());
  EXPECT_EQ(trace.groups.size(), 1u);
}

TEST_F(RecorderTest, TheFilesAreThisUsersAlone) {
  const auto recorder = make();
  struct stat info {};
  ASSERT_EQ(::stat(recorder->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(recorder->directory().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(RecorderTest, DirectoriesThatOthersCouldChangeAreRefused) {
  fs::permissions(base_, fs::perms::all);
  auto refused = Recorder::create({"a job", 0, 4, 64, base_});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::refused);
  EXPECT_NE(refused.status().message().find("MUSTER_RUN_DIR"), std::string::npos);
  fs::permissions(base_, fs::perms::owner_all);

  // A link in the place of the job's directory.
  fs::create_directory(base_ + "/elsewhere");
  fs::create_symlink(base_ + "/elsewhere", base_ + "/" + job_folder("a job"));
  refused = Recorder::create({"a job", 0, 4, 64, base_});
  EXPECT_FALSE(refused.ok());
  EXPECT_TRUE(fs::is_empty(base_ + "/elsewhere"));
}

TEST_F(RecorderTest, ReadersFollowNoLinksAndRefuseDamage) {
  const auto recorder = make();
  const std::string link = base_ + "/link";
  fs::create_symlink(recorder->path(), link);
  EXPECT_FALSE(read_trace(link).ok());
  const std::string copy = base_ + "/copy";
  fs::copy_file(recorder->path(), copy);
  EXPECT_TRUE(read_trace(copy).ok());
  fs::resize_file(copy, fs::file_size(copy) - 64);
  EXPECT_FALSE(read_trace(copy).ok());
  std::ofstream(copy) << "no trace";
  EXPECT_FALSE(read_trace(copy).ok());
}

// spec: W3 a trace that is cut short under its reader is an error, not the reader's end
TEST_F(RecorderTest, AFileThatIsCutShortMeanwhileIsAnError) {
  auto recorder = make("a job", 0, 1 << 15);
  recorder->add_group("default", kWorld, 0);  // without one nobody reads the calls
  const std::string copy = base_ + "/copy";
  fs::copy_file(recorder->path(), copy);
  const auto size = fs::file_size(copy);
  const pid_t reader = ::fork();
  if (reader == 0) {
    for (int look = 0; look < 300; ++look) static_cast<void>(read_trace(copy).ok());
    ::_exit(0);
  }
  int ended = 0;
  while (::waitpid(reader, &ended, WNOHANG) == 0) {
    fs::resize_file(copy, kHeaderBytes);
    fs::resize_file(copy, size);
  }
  EXPECT_TRUE(WIFEXITED(ended)) << "ended by signal " << WTERMSIG(ended);
}

// spec: W3 a trace that others made up does not make its reader count ranks for ever
TEST_F(RecorderTest, AWorldThatNoJobHasIsAnError) {
  const auto recorder = make("a job", 0);
  ASSERT_TRUE(read_trace(recorder->path()).ok());
  const std::int32_t world_size = std::numeric_limits<std::int32_t>::max();
  std::fstream(recorder->path(), std::ios::in | std::ios::out | std::ios::binary)
      .seekp(offsetof(FileHeader, world_size))
      .write(reinterpret_cast<const char*>(&world_size), sizeof world_size);
  EXPECT_NE(read_trace(recorder->path()).status().message().find("is no whole trace"),
            std::string::npos);
}

TEST_F(RecorderTest, AGoodEndRemovesTheFileAndABadOneLeavesIt) {
  auto good = make("a job", 0);
  auto bad = make("a job", 1);
  const std::string directory = good->directory();
  good->remove();
  good.reset();
  bad.reset();
  EXPECT_FALSE(fs::exists(directory + "/rank0.trace"));
  EXPECT_TRUE(fs::exists(directory + "/rank1.trace"));
  auto last = make("another job");
  const std::string other = last->directory();
  last->remove();
  EXPECT_FALSE(fs::exists(other));
}

TEST_F(RecorderTest, OldRemainsGoAndLiveJobsStay) {
  const auto age = [](const std::string& path) {
    const timespec times[2] = {{1, 0}, {1, 0}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  auto dead = make("dead");
  const auto live = make("live");
  auto fresh = make("fresh");
  const std::string dead_directory = dead->directory(), fresh_directory = fresh->directory();
  dead.reset();
  fresh.reset();
  fs::create_directory(base_ + "/other");  // nothing of ours
  for (const auto& path : {dead_directory, live->directory(), base_ + "/other"}) age(path);
  const auto next = make("next");
  EXPECT_FALSE(fs::exists(dead_directory));
  EXPECT_TRUE(fs::exists(live->path()));
  EXPECT_TRUE(fs::exists(fresh_directory));
  EXPECT_TRUE(fs::exists(base_ + "/other"));
}

TEST_F(RecorderTest, TheEnvironmentSaysHowMuchIsKept) {
  ::setenv("MUSTER_RUN_DIR", base_.c_str(), 1);
  ::setenv("MUSTER_TRACE_ENTRIES", "0", 1);
  auto none = Recorder::from_environment("a job", 0, 4);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, nullptr);
  EXPECT_TRUE(fs::is_empty(base_));
  ::setenv("MUSTER_TRACE_ENTRIES", "many", 1);
  EXPECT_FALSE(Recorder::from_environment("a job", 0, 4).ok());
  ::unsetenv("MUSTER_TRACE_ENTRIES");
  auto usual = Recorder::from_environment("a job", 0, 4);
  ASSERT_TRUE(usual.ok());
  ASSERT_NE(*usual, nullptr);
  const auto world = (*usual)->add_group("default", kWorld, 0);
  for (std::uint64_t i = 1; i <= 3000; ++i)
    (*usual)->begin(world, {.name = "barrier", .sequence = i}, now());
  EXPECT_GE(read((*usual)->path()).records.size(), 2000u);
  ::unsetenv("MUSTER_RUN_DIR");
}

// spec: J8 the launcher's name of a job finds its traces
TEST_F(RecorderTest, AJobIsFoundByItsNames) {
  ::setenv("MUSTER_RUN_DIR", base_.c_str(), 1);
  ::setenv("TORCHELASTIC_RUN_ID", "job7", 1);
  auto named = *Recorder::from_environment("job-1", 0, 2);
  ::setenv("TORCHELASTIC_RUN_ID", "none", 1);
  const auto unnamed = *Recorder::from_environment("job-2", 0, 2);
  ::unsetenv("TORCHELASTIC_RUN_ID");
  ::unsetenv("MUSTER_RUN_DIR");
  EXPECT_EQ(read(named->path()).run_id, "job7");
  EXPECT_EQ(read(unnamed->path()).run_id, "");
  const std::string first = named->directory(), second = unnamed->directory();
  for (const char* name : {"job7", "job-1"}) EXPECT_EQ(find_job_called(base_, name).value(), first);
  EXPECT_EQ(find_job_called(base_, "job-2").value(), second);
  EXPECT_FALSE(find_job_called(base_, "none"));
  EXPECT_EQ(find_job_of(base_, ::getpid(), wall_now_ns() + 1'000'000'000).status().code(),
            Code::invalid_argument);
  EXPECT_TRUE(find_job_of(base_, ::getpid()));
  const auto names_but = [&](const std::string& shown) {
    std::set<std::string> names;
    for (const auto& job : live_jobs_but(base_, shown)) names.insert(job.ranks.front().job);
    return names;
  };
  EXPECT_EQ(names_but(""), (std::set<std::string>{"job-1", "job-2"}));
  EXPECT_EQ(names_but(first), std::set<std::string>{"job-2"});
  named.reset();
  EXPECT_EQ(names_but(second), std::set<std::string>{}) << "who has gone runs no more";
}

TEST_F(RecorderTest, GroupsOfOneNameAndTooManyGroups) {
  const auto recorder = make();
  recorder->add_group("[0, 1]", std::vector<int>{0, 1}, 0);
  const auto second = recorder->add_group("[0, 1]", std::vector<int>{0, 1}, 0);
  recorder->begin(second, {.name = "barrier", .sequence = 1}, now());
  auto trace = read(recorder->path());
  EXPECT_EQ(trace.groups.at(1).name, "[0, 1] #2");
  EXPECT_EQ(trace.groups.at(0).started, 0u);
  EXPECT_EQ(trace.groups.at(1).started, 1u);
  std::uint16_t last = 0;
  for (int i = 0; i < 200; ++i)
    last = recorder->add_group(std::string(200, 'x') + std::to_string(i), kWorld, 0);
  recorder->begin(last, {.name = "barrier", .sequence = 1}, now());
  trace = read(recorder->path());
  EXPECT_EQ(trace.groups.size(), kGroups);
  EXPECT_NE(trace.groups[2].name, trace.groups[3].name);
  EXPECT_EQ(trace.groups[trace.records.back().group].name, "(further groups)");
}

TEST_F(RecorderTest, AMarkEndsItsCallOnce) {
  const auto recorder = make();
  const auto world = recorder->add_group("default", kWorld, 0);
  const auto begin = [&](std::uint64_t sequence) {
    return Mark(
        recorder,
        recorder->begin(world, {.name = "all_reduce", .sequence = sequence, .async = true}, now()));
  };
  auto failing = begin(1);
  { const auto dropped = begin(2); }
  const auto open = begin(3);
  { const Mark copy = open; }
  failing.fail("no");
  failing.end();
  const auto trace = read(recorder->path());
  EXPECT_EQ(trace.records.at(0).state, State::failed);
  EXPECT_EQ(trace.records.at(1).state, State::completed);
  EXPECT_EQ(trace.records.at(2).state, State::queued);
}

}  // namespace
}  // namespace muster::trace
