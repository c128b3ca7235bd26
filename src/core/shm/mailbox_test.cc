// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/mailbox.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <thread>

#include "core/base/threads/host_barrier.h"
#include "testing/limits.h"

namespace muster::shm {
namespace {

using std::chrono::seconds;

// Two threads pass a number back and forth ten thousand times. A lost wakeup would cost a whole
// minute each and exceed the limit.
void pass_back_and_forth(bool barriers) {
  constexpr int kRounds = 10'000;
  Mailbox boxes[2];
  for (Mailbox& box : boxes) box.sends_barriers = barriers;
  const auto wake = [&](Mailbox& box) {
    if (!barriers) return box.wake();
    meet_host_barrier();
    box.wake_announced();
  };
  std::atomic<int> turn{0};
  const auto wait_for = [&](int me, int value) {
    while (turn.load(std::memory_order_acquire) != value) {
      const auto ticket = boxes[me].prepare_sleep();
      if (turn.load(std::memory_order_acquire) == value) {
        boxes[me].cancel_sleep();
        return;
      }
      boxes[me].sleep(ticket, muster::testing::kMustHappen);
    }
  };
  const auto started = std::chrono::steady_clock::now();
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      wait_for(1, 2 * i + 1);
      turn.store(2 * i + 2, std::memory_order_release);
      wake(boxes[0]);
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    turn.store(2 * i + 1, std::memory_order_release);
    wake(boxes[1]);
    wait_for(0, 2 * i + 2);
  }
  other.join();
  EXPECT_LT(std::chrono::steady_clock::now() - started, seconds(50));
  EXPECT_EQ(boxes[0].sleepers.load(), 0u);
  EXPECT_EQ(boxes[1].sleepers.load(), 0u);
}

TEST(Mailbox, LosesNoWakeupBetweenThreads) { pass_back_and_forth(false); }

TEST(Mailbox, LosesNoWakeupIfSleepersSendBarriers) {
  if (!takes_host_barriers())
    GTEST_SKIP() << "this system knows no such barriers, or this build does not";
  pass_back_and_forth(true);
}

TEST(Mailbox, WakesASleeperInAnotherProcess) {
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* box = new (memory) Mailbox;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    while (box->pid.load() == 0) {
      const auto ticket = box->prepare_sleep();
      if (box->pid.load() != 0) {
        box->cancel_sleep();
        break;
      }
      box->sleep(ticket, seconds(30));
    }
    _exit(box->pid.load() == 7 ? 0 : 1);
  }
  while (box->sleepers.load() == 0) std::this_thread::yield();
  box->pid.store(7);
  box->wake();
  int result = -1;
  ASSERT_EQ(waitpid(child, &result, 0), child);
  EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0);
  munmap(memory, 4096);
}

TEST(Mailbox, SleepsNoLongerThanItsLimit) {
  Mailbox box;
  const auto ticket = box.prepare_sleep();
  box.sleep(ticket, std::chrono::milliseconds(1));
  EXPECT_EQ(box.sleepers.load(), 0u);
  box.sleep((box.prepare_sleep(), 12345u),
            muster::testing::kMustHappen);  // an outdated ticket never sleeps
  EXPECT_EQ(box.sleepers.load(), 0u);
}

}  // namespace
}  // namespace muster::shm
