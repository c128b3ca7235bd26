// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "core/collective/operation.h"

namespace muster::collective {
namespace {

TEST(QueueState, NumbersCallsAndKnowsItsHolder) {
  QueueState state;
  EXPECT_EQ(state.try_lock_as_next(), 1u);
  // This thread is inside: it cannot enter again, in either way.
  EXPECT_FALSE(state.try_lock());
  EXPECT_EQ(state.try_lock_as_next(), 0u);
  state.unlock();
  EXPECT_EQ(state.try_lock_as_next(), 2u);
  state.unlock();
  ASSERT_TRUE(state.try_lock());
  EXPECT_EQ(state.try_lock_as_next(), 0u);
  state.unlock();
  state.prepare();
  EXPECT_EQ(state.queue_next(), 3u);
  EXPECT_TRUE(state.queued());
  EXPECT_EQ(state.try_lock_as_next(), 0u);  // something is queued before it
  state.set_queued(false);
  EXPECT_EQ(state.try_lock_as_next(), 4u);
  EXPECT_EQ(state.number(), 4u);
  state.unlock();
}

// One thread that makes all calls, and others that come at any time: no two threads are inside at
// once, and no number is used twice.
TEST(QueueState, ExcludesLaterThreads) {
  constexpr int kStates = 200, kOthers = 2, kCalls = 100;
  std::vector<QueueState> states(kStates);
  std::vector<std::set<std::uint64_t>> numbers(kStates);  // protected by the state
  std::atomic<int> at{-1};
  std::atomic<bool> twice{false};
  const auto call = [&](int which) {
    QueueState& state = states[static_cast<std::size_t>(which)];
    std::uint64_t number = state.try_lock_as_next();
    if (number == 0) {
      state.lock();
      state.prepare();
      number = state.queue_next();
      state.set_queued(false);
    }
    if (!numbers[static_cast<std::size_t>(which)].insert(number).second) twice = true;
    state.unlock();
  };
  std::vector<std::thread> others;
  for (int i = 0; i < kOthers; ++i) {
    others.emplace_back([&, i] {
      for (int which = 0; which < kStates; ++which) {
        while (at < which) std::this_thread::yield();
        for (int spin = 0; spin < (which + i) * 11 % 400; ++spin) meet_host_barrier();
        for (int k = 0; k < kCalls; ++k) call(which);
      }
    });
  }
  for (int which = 0; which < kStates; ++which) {
    call(which);
    at = which;
    for (int k = 1; k < kCalls; ++k) call(which);
  }
  for (auto& thread : others) thread.join();
  EXPECT_FALSE(twice);
  for (int which = 0; which < kStates; ++which) {
    EXPECT_EQ(numbers[static_cast<std::size_t>(which)].size(), std::size_t{kCalls * (1 + kOthers)});
    EXPECT_EQ(states[static_cast<std::size_t>(which)].number(),
              std::uint64_t{kCalls * (1 + kOthers)});
  }
}

}  // namespace
}  // namespace muster::collective
