// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/stacks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "core/trace/recorder.h"
#include "core/trace/run_directory.h"
#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

int stacks_file = -1;

void write_stacks(int) {
  static constexpr char kText[] = "Thread 1 (most recent call first)\n";
  [[maybe_unused]] const ssize_t written = ::write(stacks_file, kText, sizeof kText - 1);
}

/// A process that waits for its end, or for that of this one.
class WaitingProcess {
 public:
  template <class Body>
  explicit WaitingProcess(Body prepare) {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      prepare();
      const char byte = 1;
      if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  ~WaitingProcess() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  bool lives() const { return ::waitpid(pid_, nullptr, WNOHANG) == 0; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

// spec: V8.stacks stacks: a process that has muster.debug's handler writes its own
TEST(DashStacks, AsksTheProcess) {
  const WaitingProcess process([] {
    stacks_file = ::memfd_create("muster-stacks", MFD_CLOEXEC);
    ::signal(SIGRTMIN + 7, write_stacks);
  });
  EXPECT_EQ(ask_for_stacks(process.pid()), "Thread 1 (most recent call first)\n");
  EXPECT_EQ(ask_for_stacks(process.pid()), "Thread 1 (most recent call first)\n");
  EXPECT_TRUE(process.lives());
}

// spec: V8.stacks stacks: a process without the handler or without the file gets no signal, which
// would end it
TEST(DashStacks, SendsNoSignalToOthers) {
  const WaitingProcess plain([] {});
  const WaitingProcess with_file(
      [] { stacks_file = ::memfd_create("muster-stacks", MFD_CLOEXEC); });
  for (const auto* process : {&plain, &with_file}) {
    EXPECT_EQ(ask_for_stacks(process->pid()), "");
    EXPECT_TRUE(process->lives());
  }
}

// spec: V8.stacks stacks: only a process that writes the trace counts, not another of its number
TEST(DashStacks, KnowsTheProcessByItsTrace) {
  const muster::testing::ScratchFolder folder;
  const auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  auto rank = trace::read_trace((*recorder)->path());
  ASSERT_TRUE(rank.ok()) << rank.status().message();
  EXPECT_TRUE(is_process_here(*rank));
  rank->pid = ::getppid();
  EXPECT_FALSE(is_process_here(*rank));
}

// spec: V8.stacks of C++ by a debugger that is installed, only if asked for, and of the kernel
TEST(DashStacks, AsksTheDebugger) {
  const muster::testing::ScratchFolder folder;
  const WaitingProcess process([&] {
    static const auto recorder =
        trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  });
  const auto job = trace::read_job(folder.file("run") + "/" + trace::job_folder("a job"));
  ASSERT_TRUE(job.ok()) << job.status().message();
  ASSERT_TRUE(is_process_here(job->ranks[0]));
  const RankStacks plain = stacks_of(job->ranks[0], false), native = stacks_of(job->ranks[0], true);
  EXPECT_EQ(plain.sections.back().source, "kernel");
  EXPECT_TRUE(contains(plain.sections.back().text, "thread ")) << plain.sections.back().text;
  for (const auto& section : plain.sections)
    EXPECT_TRUE(section.source == "kernel" || section.source == "py-spy") << section.source;
  EXPECT_TRUE(process.lives());
  if (!native.notes.empty() && contains(native.notes.back(), "elfutils"))
    GTEST_SKIP() << "neither eu-stack nor gdb is installed";
  ASSERT_GE(native.sections.size(), 2u);
  EXPECT_TRUE(contains(native.sections[native.sections.size() - 2].text, "pause"))
      << native.sections[native.sections.size() - 2].text;
}

}  // namespace
}  // namespace muster::cli::testing
