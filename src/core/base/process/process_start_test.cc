// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/process_start.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace muster {
namespace {

// spec: H2 a stopped process of this host is told from one that waits for a core
TEST(ProcessState, IsWhatTheKernelSays) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (;;) ::pause();
  }
  const auto start = process_start(child);
  ASSERT_TRUE(start && *start > 0);
  EXPECT_EQ(process_state(child, *start), ProcessState::running);
  EXPECT_EQ(process_state(child, *start + 1), ProcessState::unknown) << "another process";
  int status = 0;
  ::kill(child, SIGSTOP);
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_EQ(process_state(child, *start), ProcessState::stopped);
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, WCONTINUED), child);
  EXPECT_EQ(process_state(child, *start), ProcessState::running);
  ::kill(child, SIGKILL);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(process_state(child, *start), ProcessState::unknown) << "it has ended";
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(process_state(child, *start), ProcessState::unknown);
}

// spec: H2 a process that a signal has ended is told from one that ended by itself
TEST(EndingSignal, IsWhatTheKernelSays) {
  for (const int signal : {SIGSEGV, SIGKILL, 0}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const rlimit none{0, 0};
      ::setrlimit(RLIMIT_CORE, &none);
      ::signal(SIGSEGV, SIG_DFL);  // sanitizers handle it
      if (signal == 0) ::_exit(3);
      ::raise(SIGSTOP);
      for (;;) ::pause();
    }
    const auto start = process_start(child);
    ASSERT_TRUE(start);
    if (signal != 0) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
      EXPECT_EQ(ending_signal(child, *start), std::nullopt) << "it is only stopped";
      ::kill(child, signal);
      ::kill(child, SIGCONT);
    }
    siginfo_t ended{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
    EXPECT_EQ(ending_signal(child, *start), signal);
    EXPECT_EQ(ending_signal(child, *start + 1), std::nullopt) << "another process";
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    EXPECT_EQ(ending_signal(child, *start), std::nullopt);
  }
}

}  // namespace
}  // namespace muster
