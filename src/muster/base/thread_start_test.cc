#include "muster/base/thread_start.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

namespace muster {
namespace {

bool is_blocked(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

TEST(ThreadStart, TheNewThreadTakesNoSignalsUnlessItIsToldTo) {
  for (const Signals signals : {Signals::blocked, Signals::inherited}) {
    bool blocked = false;
    auto thread = start_thread(
        "a thread", [&] { blocked = is_blocked(SIGTERM); }, signals);
    ASSERT_TRUE(thread.ok());
    thread->join();
    EXPECT_EQ(blocked, signals == Signals::blocked);
    EXPECT_FALSE(is_blocked(SIGTERM));
  }
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
