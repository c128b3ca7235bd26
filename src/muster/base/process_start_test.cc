#include "muster/base/process_start.h"

#include <gtest/gtest.h>
#include <signal.h>
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

}  // namespace
}  // namespace muster
