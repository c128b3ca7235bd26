// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/threads/host_barrier.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

namespace muster {
namespace {

constexpr std::uint32_t kRounds = 20'000;

/// Two sides that store and then look, round by round, each on a line of its own.
struct Meeting {
  alignas(64) std::atomic<std::uint32_t> quick{0};
  alignas(64) std::atomic<std::uint32_t> slow{0};
  alignas(64) std::atomic<std::uint32_t> quick_missed{
      0};  // round in which the quick side did not see the slow one's store
  alignas(64) std::atomic<std::uint32_t> quick_done{0};
  alignas(64) std::atomic<std::uint32_t> slow_done{0};
};

void wait_for(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  for (int looks = 0; word.load(std::memory_order_acquire) < value; ++looks)
    if (looks > 1000) std::this_thread::yield();
}

void play_quick(Meeting& with) {
  for (std::uint32_t round = 1; round <= kRounds; ++round) {
    wait_for(with.slow_done, round - 1);
    with.quick.store(round, std::memory_order_release);
    meet_host_barrier();
    if (with.slow.load(std::memory_order_relaxed) < round)
      with.quick_missed.store(round, std::memory_order_relaxed);
    with.quick_done.store(round, std::memory_order_release);
  }
}

/// Rounds in which neither side saw the other.
int play_slow(Meeting& with) {
  int lost = 0;
  for (std::uint32_t round = 1; round <= kRounds; ++round) {
    wait_for(with.quick_done, round - 1);
    with.slow.store(round, std::memory_order_release);
    send_host_barrier();
    const bool missed = with.quick.load(std::memory_order_relaxed) < round;
    wait_for(with.quick_done, round);
    lost += missed && with.quick_missed.load(std::memory_order_relaxed) == round ? 1 : 0;
    with.slow_done.store(round, std::memory_order_release);
  }
  return lost;
}

TEST(HostBarrier, OneSidePaysForBothThreads) {
  if (!takes_host_barriers())
    GTEST_SKIP() << "this system knows no such barriers, or this build does not";
  Meeting meeting;
  std::thread quick([&] { play_quick(meeting); });
  EXPECT_EQ(play_slow(meeting), 0);
  quick.join();
}

TEST(HostBarrier, ReachesOtherProcesses) {
  if (!takes_host_barriers())
    GTEST_SKIP() << "this system knows no such barriers, or this build does not";
  void* const memory =
      ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const meeting = new (memory) Meeting;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    play_quick(*meeting);
    ::_exit(takes_host_barriers() ? 0 : 1);
  }
  EXPECT_EQ(play_slow(*meeting), 0);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ::munmap(memory, sizeof(Meeting));
}

TEST(HostBarrier, TheAnswerStays) {
  const bool first = takes_host_barriers();
  send_host_barrier();
  EXPECT_EQ(takes_host_barriers(), first);
}

}  // namespace
}  // namespace muster
