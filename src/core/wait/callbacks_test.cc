// SPDX-License-Identifier: BSD-3-Clause
// Threads for callbacks: nested waits, order, ends.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/wait/callbacks.h"
#include "testing/budget.h"
#include "testing/limits.h"

namespace muster {
namespace {

constexpr auto kLong = muster::testing::kMustHappen;

CallbackExecutor& executor() { return CallbackExecutor::of_process(); }

void wait_for(std::future<void> future) {
  ASSERT_EQ(future.wait_for(kLong), std::future_status::ready);
}

// spec: E3 get_future: a callback may wait for what a later one does, to any depth
TEST(CallbackExecutor, JobsWaitForLaterJobs) {
  std::function<void(int)> nest = [&](int depth) {
    if (depth == 0) return;
    std::promise<void> inner;
    executor().run([&] {
      nest(depth - 1);
      inner.set_value();
    });
    wait_for(inner.get_future());
  };
  std::promise<void> over;
  executor().run([&] {
    nest(20);
    over.set_value();
  });
  wait_for(over.get_future());
}

// A queue that is looked at seldom does not delay one that is looked at often.
TEST(CallbackExecutor, EachWatchedIsLookedAtAtLeastAsOftenAsItSays) {
  struct WatchedQueue final : CallbackExecutor::WatchedQueue {
    explicit WatchedQueue(Duration period) : every(period) {}
    bool look(TimePoint /*now*/) override {
      if (++looks == 3) over.set_value();
      return looks < 3;
    }
    Duration period() const override { return every; }
    const Duration every;
    int looks = 0;
    std::promise<void> over;
  };
  const auto seldom = std::make_shared<WatchedQueue>(std::chrono::hours(1));
  const auto often = std::make_shared<WatchedQueue>(std::chrono::milliseconds(1));
  executor().watch(seldom);
  executor().watch(often);
  wait_for(often->over.get_future());
}

TEST(CallbackExecutor, WhatAJobThrowsEndsNothing) {
  std::promise<void> over;
  executor().run([] { throw std::runtime_error("a callback of the test's"); });
  executor().run([] { throw 5; });
  executor().run([&] { over.set_value(); });
  wait_for(over.get_future());
}

TEST(CallbackExecutor, AForkedChildHasItsOwn) {
  if (testing::kSanitized)
    GTEST_SKIP() << "a fork may catch a lock of the sanitizer's that another thread holds";
  std::promise<void> here, go;
  executor().run([&] {
    here.set_value();
    go.get_future().wait();
  });
  wait_for(here.get_future());
  const pid_t child = ::fork();
  if (child == 0) {
    std::promise<void> over;
    executor().run([&] { over.set_value(); });
    ::_exit(over.get_future().wait_for(kLong) == std::future_status::ready ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  go.set_value();
}

TEST(CallbackExecutor, TheEndWaitsForJobsAndRunsNoneAfter) {
  const auto ends_well = [] {
    std::atomic<bool> done{false}, after{false};
    executor().run([&] {
      std::promise<void> inner;
      executor().run([&] { inner.set_value(); });
      inner.get_future().wait();
      done.store(true);
    });
    std::atomic<bool> usable{true};
    const bool over = executor().finish(kLong, [&] { return usable.load(); });
    std::promise<void> late;
    executor().run([&] { late.set_value(); });
    late.get_future().wait();
    usable.store(false);
    executor().run([&] { after.store(true); });
    return over && done.load() && executor().finish(kLong, [] { return false; }) && !after.load();
  };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(ends_well() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// spec: E3 get_future: what callbacks start is started in the same order on every rank
TEST(CallbackLane, JobsRunInTheirOrderOneAtATime) {
  const auto lane = std::make_shared<CallbackLane>();
  std::vector<int> order;  // of one job at a time
  std::atomic<int> running{0}, beside{0};
  std::promise<void> over;
  for (int i = 0; i < 500; ++i) {
    lane->run([&, i] {
      beside += running.fetch_add(1);
      order.push_back(i);
      running.fetch_sub(1);
      if (i == 499) over.set_value();
    });
  }
  wait_for(over.get_future());
  EXPECT_EQ(beside.load(), 0);
  for (int i = 0; i < 500; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

// spec: E3 get_future: a callback may wait for one that comes after it
TEST(CallbackLane, AJobMayWaitForALaterOne) {
  const auto lane = std::make_shared<CallbackLane>();
  std::promise<void> first, second, third;
  lane->run([&] {
    wait_for(second.get_future());
    first.set_value();
  });
  lane->run([&] {
    wait_for(third.get_future());
    second.set_value();
  });
  lane->run([&] { third.set_value(); });
  wait_for(first.get_future());
}

TEST(CallbackLane, WhatComesOfAJobDoesNotStandBehindIt) {
  const auto lane = std::make_shared<CallbackLane>();
  EXPECT_EQ(CallbackLane::of_this_job(), nullptr);
  std::vector<int> order;
  std::promise<void> over;
  lane->run([&] {
    const CallbackLane::Busy waits;
    std::promise<void> child;
    CallbackLane::of_this_job()->run([&] {
      order.push_back(1);
      child.set_value();
    });
    wait_for(child.get_future());
    order.push_back(2);
  });
  lane->run([&] {
    order.push_back(3);
    over.set_value();
  });
  wait_for(over.get_future());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(ThreadRest, TellsASleeperFromOneThatComputes) {
  std::promise<pid_t> sleeper, worker;
  std::promise<void> wake;
  std::atomic<bool> stop{false};
  std::thread sleeps([&] {
    sleeper.set_value(ThreadRest::this_thread());
    wake.get_future().wait();
  });
  std::thread works([&] {
    worker.set_value(ThreadRest::this_thread());
    while (!stop.load()) {
    }
  });
  ThreadRest of_sleeper(sleeper.get_future().get()), of_worker(worker.get_future().get());
  const TimePoint limit = steady_clock().now() + kLong;
  Duration asleep{}, works_asleep{};
  while (asleep < std::chrono::milliseconds(50) && steady_clock().now() < limit) {
    asleep = of_sleeper.asleep_for(steady_clock().now());
    works_asleep = std::max(works_asleep, of_worker.asleep_for(steady_clock().now()));
    std::this_thread::yield();
  }
  EXPECT_GE(asleep, std::chrono::milliseconds(50));
  EXPECT_EQ(works_asleep, Duration::zero());
  wake.set_value();
  stop.store(true);
  sleeps.join();
  works.join();
}

}  // namespace
}  // namespace muster
