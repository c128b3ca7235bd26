// SPDX-License-Identifier: BSD-3-Clause
// The surroundings of `muster run` in practice: closed streams, other programs' ports, watchers of
// events, folders of logs.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <thread>
#include <utility>

#include "core/base/process/limits.h"
#include "faces/cli/testing/launched.h"
#include "testing/limits.h"
#include "testing/shell.h"

namespace muster::cli::testing {
namespace {

// spec: J3 streams that the caller has closed do not keep the launcher from ending, and are written
// to by nobody
TEST(Habits, ClosedStreamsLeadNowhere) {
  const std::string command = std::string(MUSTER_COMMAND) +
                              " run --standalone --nproc-per-node 2 sh -c 'echo out; echo err >&2'";
  for (const char* closed : {">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    const auto ended = muster::testing::run_shell("(timeout 120 " + command + " " + closed + ")");
    EXPECT_EQ(ended.code, 0) << closed << ": " << ended.output;
  }
  const auto shown = muster::testing::run_shell("(" + command + " >&-)");
  EXPECT_EQ(sorted_lines(shown.output), (std::vector<std::string>{"[0] err", "[1] err"}));
}

// spec: J3 what a full disk does not take is not lost in silence
TEST(Habits, AFullDiskIsTold) {
  for (const char* command :
       {" --version", " environment", " doctor", " bench --sizes 8 --seconds 0.01"}) {
    const auto ended = muster::testing::run_shell("(timeout 120 " + std::string(MUSTER_COMMAND) +
                                                  command + " >/dev/full)");
    EXPECT_EQ(ended.code, 1) << command;
    EXPECT_TRUE(contains(ended.output, "could be written to standard output")) << ended.output;
  }
  const auto job = muster::testing::run_shell(
      "(" + std::string(MUSTER_COMMAND) +
      " run --standalone --nproc-per-node 2 sh -c 'echo out' >/dev/full)");
  EXPECT_EQ(job.code, 0) << "the workers have ended well";
  EXPECT_TRUE(contains(job.output, "cannot be written to standard output: no space left on device"))
      << job.output;
}

// spec: L13 the events say how many restarts there were, and the exit code of a killed worker as a
// shell does
TEST(Habits, EventsCountRestartsAndNameKills) {
  const TemporaryFolder folder("muster-test-");
  const std::string file = folder.path() + "/events";
  const Outcome outcome =
      run({"run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1", "--events", file,
           "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT = 1 || kill -KILL $$"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string events = contents(file);
  EXPECT_EQ(count_of(events, "\"restarts\":0"), 1) << events;
  EXPECT_EQ(count_of(events, "\"restarts\":1"), 1) << events;
  EXPECT_EQ(count_of(events, "\"exit_code\":137,\"signal\":\"SIGKILL\""), 1) << events;
}

/// `muster run` with events on a standard error that is full, and that nobody reads.
class UnreadEvents {
 public:
  UnreadEvents() {
    int out[2], err[2];
    if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) throw std::bad_alloc();
    ::fcntl(err[1], F_SETFL, O_NONBLOCK);
    const std::string much(4096, '#');
    while (::write(err[1], much.data(), much.size()) > 0) {
    }
    ::fcntl(err[1], F_SETFL, 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out[1], 1);
      ::dup2(err[1], 2);
      ::execl(MUSTER_COMMAND, MUSTER_COMMAND, "run", "--standalone", "--nproc-per-node", "1",
              "--event-log-handler", "console", "sh", "-c",
              "trap 'echo stopped; exit 5' TERM; echo ready; while :; do sleep 0.05; done",
              nullptr);
      ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
    out_.reset(out[0]);
    err_.reset(err[0]);
  }
  ~UnreadEvents() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  bool wait_for_output(const std::string& text) {
    pollfd ready{out_.get(), POLLIN, 0};
    while (!contains(said_, text)) {
      char bytes[256];
      if (::poll(&ready, 1, muster::testing::kMustHappenMs) != 1) return false;
      const ssize_t got = ::read(out_.get(), bytes, sizeof bytes);
      if (got <= 0) return false;
      said_.append(bytes, static_cast<std::size_t>(got));
    }
    return true;
  }
  void signal(int number) { ::kill(pid_, number); }
  std::string read_all() {
    std::string text;
    char bytes[4096];
    ssize_t got = 0;
    while ((got = ::read(err_.get(), bytes, sizeof bytes)) > 0)
      text.append(bytes, static_cast<std::size_t>(got));
    return text;
  }
  int end() {
    int state = 0;
    ::waitpid(std::exchange(pid_, -1), &state, 0);
    return WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
  }
  /// By as many signals as it takes.
  int end_by(int number) {
    siginfo_t ended{};
    while (::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ended.si_pid == 0) {
      signal(number);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return end();
  }

 private:
  pid_t pid_ = -1;
  Descriptor out_, err_;
  std::string said_;
};

// spec: L13.events events that nobody reads hold up neither the workers' start nor a signal; they
// come when the reader does
TEST(Habits, EventsThatNobodyReadsHoldNothingUp) {
  UnreadEvents job;
  ASSERT_TRUE(job.wait_for_output("ready"));
  job.signal(SIGTERM);
  ASSERT_TRUE(job.wait_for_output("stopped"));
  const std::string events = job.read_all();
  EXPECT_EQ(job.end(), 128 + SIGTERM);
  EXPECT_EQ(count_of(events, "\"event\":\"workers_started\""), 1) << events;
  EXPECT_EQ(count_of(events, "\"event\":\"ended\""), 1) << events;
}

// spec: L13.events nor the end of the job, if nobody ever does
TEST(Habits, EventsThatNobodyEverReadsLetTheJobEnd) {
  UnreadEvents job;
  ASSERT_TRUE(job.wait_for_output("ready"));
  job.signal(SIGTERM);
  ASSERT_TRUE(job.wait_for_output("stopped"));
  // A signal ends the wait for who reads the report on standard error, and only that.
  EXPECT_EQ(job.end_by(SIGTERM), 128 + SIGTERM);
}

// spec: J3 the port that programs of torch take by themselves is left to them
TEST(Habits, ProgramsPortsAreLeftToThem) {
  const Outcome outcome = run(
      {"run", "--nproc-per-node", "1", "sh", "-c", "echo ${MUSTER_AGENT_STORE##*:} $MASTER_PORT"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(contains(outcome.out, "29500")) << outcome.out;
}

// spec: V10.oom the report says that a worker was killed for want of memory
TEST(Habits, AKillForWantOfMemoryIsNamed) {
  const auto groups = control_groups("memory");
  // The counter that the kernel would raise is a file on another /sys, which root can have.
  if (::geteuid() != 0 || groups.empty())
    GTEST_SKIP() << "only root can mount another /sys/fs/cgroup, where there is a memory group";
  const std::string folder = groups.front().folder;
  const std::string counter =
      folder + (groups.front().unified ? "/memory.events" : "/memory.oom_control");
  const auto another_sys = [&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0, nullptr) != 0)
      ::_exit(127);
    std::filesystem::create_directories(folder);
    std::ofstream(counter) << "oom_kill 3\n";
  };
  const std::string die = "test $RANK = 0 || { echo oom_kill 4 > " + counter + "; kill -KILL $$; }";
  for (const bool killed : {true, false}) {
    const auto words = shell(2, killed ? die : "test $RANK = 0 || kill -KILL $$");
    const Outcome outcome = Launched(words, {}, another_sys).finish();
    EXPECT_EQ(outcome.code, 137) << outcome.err;
    const std::string cause =
        "SIGKILL (signal 9: Killed); out of memory: the kernel has killed a "
        "process of the control group " +
        folder;
    EXPECT_EQ(contains(outcome.err, cause), killed) << outcome.err;
  }
}

// spec: W3 logs are for this user and its group
TEST(Habits, LogsAreNotForAll) {
  const TemporaryFolder folder("muster-test-");
  const Outcome outcome =
      run({"run", "--standalone", "--nproc-per-node", "1", "--rdzv-id", "logs", "--log-dir",
           folder.path(), "--redirects", "3", "sh", "-c", "echo out"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const auto mode = [&](const std::string& name) {
    struct stat info {};
    EXPECT_EQ(::stat((folder.path() + name).c_str(), &info), 0) << name;
    return info.st_mode & 0777;
  };
  EXPECT_EQ(mode("/logs"), 0750U);
  EXPECT_EQ(mode("/logs/attempt_0/0/stdout.log"), 0640U);
}

}  // namespace
}  // namespace muster::cli::testing
