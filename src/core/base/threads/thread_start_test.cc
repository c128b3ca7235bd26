// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include "core/base/threads/thread_start.h"

namespace muster {
namespace {

bool is_blocked(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

TEST(ThreadStart, TheNewThreadTakesNoSignalsOfTheProgram) {
  auto thread = start_thread("a thread", [] {
    for (const int each : {SIGTERM, SIGINT, SIGALRM, SIGUSR1, SIGCHLD})
      EXPECT_TRUE(is_blocked(each)) << each;
    EXPECT_FALSE(is_blocked(SIGSEGV)) << "a fault must reach the handler that reports it";
  });
  ASSERT_TRUE(thread.ok());
  thread->join();
  EXPECT_FALSE(is_blocked(SIGTERM));
}

TEST(ThreadStart, UserCodeOnItHasTheSignalsOfTheProgram) {
  auto thread = start_thread("a thread", [] {
    {
      const ProgramSignals programs;
      EXPECT_FALSE(is_blocked(SIGTERM));
      auto inner = start_thread("a thread of a thread", [] {
        EXPECT_TRUE(is_blocked(SIGTERM));
        const ProgramSignals outermost;
        EXPECT_FALSE(is_blocked(SIGTERM));
      });
      ASSERT_TRUE(inner.ok());
      inner->join();
    }
    EXPECT_TRUE(is_blocked(SIGTERM));
  });
  ASSERT_TRUE(thread.ok());
  thread->join();
}

TEST(ThreadStart, OnAThreadOfTheProgramNothingChanges) {
  const ProgramSignals programs;
  EXPECT_FALSE(is_blocked(SIGTERM));
}

TEST(ThreadStart, ARefusedThreadIsAStatusAndLeavesTheSignalsAlone) {
  const NoNewThreads refused;
  bool ran = false;
  const auto thread = start_thread("the thread of this test", [&] { ran = true; });
  ASSERT_FALSE(thread.ok());
  EXPECT_EQ(thread.status().code(), Code::exhausted);
  EXPECT_NE(thread.status().message().find("the thread of this test"), std::string::npos)
      << thread.status().message();
  EXPECT_FALSE(ran);
  EXPECT_FALSE(is_blocked(SIGTERM));
}

}  // namespace
}  // namespace muster
