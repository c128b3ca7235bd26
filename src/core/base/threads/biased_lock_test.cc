// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/threads/biased_lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace muster {
namespace {

/// A number that grows without atomic additions while one thread owns the lock.
class Number {
 public:
  void add() {
    if (biased_lock_.enter()) {
      value_.store(value_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      biased_lock_.leave();
      return;
    }
    biased_lock_.revoke();
    value_.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t value() const { return value_; }

 private:
  BiasedLock biased_lock_;
  std::atomic<std::uint64_t> value_{0};
};

TEST(BiasedLock, FavoursTheFirstThread) {
  BiasedLock bias;
  if (!takes_host_barriers()) {
    EXPECT_FALSE(bias.enter());
    return;
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(bias.enter());
    bias.leave();
  }
  std::thread([&] { EXPECT_FALSE(bias.enter()); }).join();
  EXPECT_TRUE(bias.enter());  // nobody has revoked it
  bias.leave();
}

TEST(BiasedLock, IsOverOnceRevoked) {
  BiasedLock bias;
  static_cast<void>(bias.enter() ? bias.leave() : void());
  std::thread([&] { bias.revoke(); }).join();
  EXPECT_FALSE(bias.enter());
  bias.revoke();
  EXPECT_FALSE(bias.enter());
  BiasedLock unused;
  unused.revoke();
  EXPECT_FALSE(unused.enter());
}

TEST(BiasedLock, WaitsForWhoIsInside) {
  if (!takes_host_barriers()) GTEST_SKIP() << "nobody is the owner here";
  BiasedLock bias;
  ASSERT_TRUE(bias.enter());
  std::atomic<bool> began{false}, over{false};
  int seen = 0, inside = 0;
  std::thread other([&] {
    began = true;
    bias.revoke();
    seen = inside;
    over = true;
  });
  while (!began) std::this_thread::yield();
  for (int i = 0; i < 1000; ++i) {
    std::this_thread::yield();
    ASSERT_FALSE(over);
  }
  inside = 7;
  bias.leave();
  other.join();
  EXPECT_EQ(seen, 7);
}

// One number after another, so that there are many moments in which the second thread comes.
TEST(BiasedLock, LosesNothingWhenAnotherThreadComes) {
  constexpr int kNumbers = 300, kOthers = 2;
  constexpr std::uint64_t kAdded = 200;
  std::vector<Number> numbers(kNumbers);
  std::atomic<int> at{-1};
  std::vector<std::thread> others;
  for (int i = 0; i < kOthers; ++i) {
    others.emplace_back([&, i] {
      for (int n = 0; n < kNumbers; ++n) {
        while (at < n) std::this_thread::yield();
        for (int spin = 0; spin < (n + i) * 7 % 300; ++spin) meet_host_barrier();
        for (std::uint64_t k = 0; k < kAdded; ++k) numbers[static_cast<std::size_t>(n)].add();
      }
    });
  }
  for (int n = 0; n < kNumbers; ++n) {
    numbers[static_cast<std::size_t>(n)].add();
    at = n;
    for (std::uint64_t k = 1; k < kAdded; ++k) numbers[static_cast<std::size_t>(n)].add();
  }
  for (auto& thread : others) thread.join();
  for (const Number& number : numbers) EXPECT_EQ(number.value(), kAdded * (1 + kOthers));
}

}  // namespace
}  // namespace muster
