// SPDX-License-Identifier: BSD-3-Clause
// Queued calls.
#include <algorithm>
#include <array>
#include <ctime>
#include <future>

#include "core/collective/queue/driver.h"
#include "core/collective/testing/communicator_job.h"
#include "testing/limits.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

// spec: F1 async_op; a blocking call drives earlier ones first
TEST(Queue, StartedCallsRunInTheirOrder) {
  for (Wire wire : testing::kWires) {
    with_group(3, wire, [](int rank, Communicator& group) {
      constexpr std::size_t kCalls = 12;
      std::vector<Values> in(kCalls), out(kCalls);
      const auto right = [&](std::size_t i) {
        return out[i] == Values(in[i].size(), 3 + 3 * static_cast<int>(i));
      };
      std::vector<PendingRef> pending;
      std::array<std::atomic<int>, kCalls> called{}, early{};
      for (std::size_t i = 0; i < kCalls; ++i) {
        in[i].assign(i % 2 == 0 ? 3 : 30'000, rank + static_cast<int>(i));
        out[i].resize(in[i].size());
        pending.push_back(group.start(all_reduce(in[i], out[i]), soon()));
        pending.back()->when_settled([&, i](const Status&) {
          called[i].fetch_add(1);
          for (std::size_t before = 0; before <= i; ++before)
            early[i].fetch_add(right(before) ? 0 : 1);
        });
      }
      Values sum(1);
      ASSERT_TRUE(group.run(all_reduce({1}, sum), soon()).ok());
      EXPECT_EQ(sum[0], 3);
      for (std::size_t i = 0; i < kCalls; ++i) {
        EXPECT_TRUE(pending[i]->done());
        EXPECT_TRUE(pending[i]->wait(soon()).ok());
        EXPECT_TRUE(right(i)) << "call " << i;
      }
      ASSERT_TRUE(group.close(soon()).ok());  // no callback is running any more
      for (std::size_t i = 0; i < kCalls; ++i) {
        EXPECT_EQ(called[i].load(), 1) << "call " << i;
        EXPECT_EQ(early[i].load(), 0)
            << "call " << i << " was told to be done before others that stood before it";
      }
    });
  }
}

TEST(Queue, DroppedAndUnwaitedCallsContinue) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values out(40'000);
      const Values in(40'000, rank + 1);
      std::atomic<bool> done{false};
      group.start(all_reduce(in, out), soon())->when_done([&](const Status& status) {
        done.store(status.ok());
      });
      while (!done.load()) std::this_thread::yield();  // only the progress thread drives it
      EXPECT_EQ(out[39'999], 3);
    });
  }
}

// Both ranks drive their calls themselves at first; the progress thread completes the rest.
TEST(Queue, ADrivingThreadMayLeave) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values in(40'000, rank + 1);
      Values one(40'000), two(40'000);
      auto driving = group.manual_progress();
      const auto first = group.start(all_reduce(in, one), soon());
      while (!first->done()) std::this_thread::yield();
      EXPECT_EQ(one[39'999], 3);
      std::atomic<bool> done{false};
      group.start(all_reduce(in, two), soon())->when_done([&](const Status& status) {
        done.store(status.ok());
      });
      driving.reset();
      while (!done.load()) std::this_thread::yield();
      EXPECT_EQ(two[39'999], 3);
    });
  }
}

// Both ranks have promised to drive, and block elsewhere.
TEST(Queue, ABlockedDrivingThreadIsHelped) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values in(300'000, rank + 1);
      Values out(in.size());
      const auto driving = group.manual_progress();
      std::promise<Status> ended;
      group.start(all_reduce(in, out), soon())->when_done([&](const Status& status) {
        ended.set_value(status);
      });
      EXPECT_TRUE(ended.get_future().get().ok());
      EXPECT_EQ(out.back(), 3);
    });
  }
}

/// Records that a call has started, and then runs an action.
struct StartProbe {
  explicit StartProbe(std::function<void()> then = {},
                      Duration limit = muster::testing::kMustHappen)
      : note([this, then = std::move(then)] {
          ++times;
          if (then) then();
        }) {
    record.timeout = limit;
    record.when_started = &note;
  }
  StartProbe(const StartProbe&) = delete;
  const std::function<void()> note;
  CallRecord record;
  int times = 0;
};

// Rank 1 returns and ends the group while rank 0 has published its call but not polled yet. In the
// second round, rank 1 sends more than fits into a line or slot.
TEST(Queue, AFailureDoesNotOvertakeEarlierData) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{50'000}}) {
    with_group(2, Wire::shm, [&](int rank, Communicator& group) {
      Values mine(rank == 0 ? 1 : count, rank + 1), first(1), second(count);
      Args args;
      args.op = Op::all_gather;
      args.dtype = DType::int64;
      args.inputs = {bytes(mine)};
      args.outputs = {bytes(first), bytes(second)};
      if (rank == 1) {
        EXPECT_TRUE(group.run(args, soon()).ok());
        group.abort("rank 1 has all it wants");
        return;
      }
      StartProbe until_it_has_failed([&] {
        const TimePoint deadline = soon();
        while (group.failure().ok() && steady_clock().now() < deadline)
          group.channel().fabric().poll();
      });
      args.checked = true;
      const Status status = group.run(args, until_it_has_failed.record);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(second, Values(count, 2));
      const Status next = group.run(all_reduce(mine, first), soon());
      EXPECT_TRUE(contains(next.message(), "has all it wants")) << next.message();
    });
  }
}

// The time before the wait began counts towards the deadline.
TEST(Queue, AMissedDeadlineReportsTheWholeWait) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{50'000}}) {
    with_group(2, Wire::shm, [&](int rank, Communicator& group) {
      if (rank == 1) return;
      CallRecord begun_long_ago(steady_clock().now());
      begun_long_ago.begun = steady_clock().now() - seconds(72'000);
      Values mine(count, 1), sum(count);
      const Status status = group.run(all_reduce(mine, sum), begun_long_ago);
      EXPECT_EQ(status.code(), Code::timed_out);
      EXPECT_TRUE(contains(status.message(), "rank 0 waited 1200 min")) << status.message();
    });
  }
}

// Three ranks with dedicated cores: a call too large for a line is driven by its caller's thread
// for one round trip, and is queued after that.
TEST(Queue, ALargerCallIsReportedOnce) {
  with_group(3, Wire::region, [](int rank, Communicator& group) {
    for (const std::size_t count : {5'000, 50'000, 500'000}) {
      for (int turn = 0; turn < testing::test_rounds(20, 20); ++turn) {
        Values mine(count, rank + turn), sum(count);
        StartProbe probe;
        const Status status = group.run(all_reduce(mine, sum), probe.record);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(probe.times, 1);
        EXPECT_FALSE(probe.record.completed_inline) << "more than a line was to be waited for";
        EXPECT_EQ(sum, Values(count, 3 + 3 * turn));
      }
    }
  });
}

// Rank 2 arrives when the others' calls have moved from their threads to the queue, where another
// thread of theirs finds them.
TEST(Queue, ALargerCallThatMustWaitLetsOthersIn) {
  constexpr std::size_t kCount = 50'000;
  std::barrier gate(3);
  with_group(3, Wire::region, [&](int rank, Communicator& group) {
    Values mine(kCount, rank), sum(kCount), next{rank}, next_sum(1);
    std::thread behind;
    StartProbe probe([&] {
      if (rank == 2) return;
      behind = std::thread([&] {
        const auto second = group.start(all_reduce(next, next_sum), soon());
        EXPECT_EQ(second->wait(in(milliseconds(20))).code(),
                  Code::timed_out);  // it drives both meanwhile
        gate.arrive_and_wait();
        EXPECT_TRUE(second->wait(soon()).ok());
      });
    });
    if (rank == 2) gate.arrive_and_wait();
    const Status status = group.run(all_reduce(mine, sum), probe.record);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(probe.times, 1);
    if (rank == 2) {
      EXPECT_TRUE(group.run(all_reduce(next, next_sum), soon()).ok());
    }
    if (rank != 2 && probe.times == 0) gate.arrive_and_drop();
    if (behind.joinable()) behind.join();
    EXPECT_EQ(sum, Values(kCount, 3));
    EXPECT_EQ(next_sum[0], 3);
  });
}

// The deadline may pass within the time of a round trip, or later.
TEST(Queue, ALargerCallNamesTheMissingRank) {
  for (const Duration limit : {Duration::zero(), Duration(seconds(2))}) {
    std::barrier both(2), gate(3);
    with_group(3, Wire::region, [&](int rank, Communicator& group) {
      Values mine(50'000, rank), sum(mine.size());
      if (rank != 2) {
        StartProbe probe([&] { both.arrive_and_wait(); }, limit);
        both.arrive_and_wait();  // the time of the one runs while it waits for the other
        const Status late = group.run(all_reduce(mine, sum), probe.record);
        EXPECT_EQ(late.code(), Code::timed_out) << late.message();
        const std::vector<int> missing =
            late.ranks();  // without time to wait, the first member to check misses all others
        EXPECT_TRUE(std::find(missing.begin(), missing.end(), 2) != missing.end())
            << late.message();
        if (limit > Duration::zero()) {
          EXPECT_EQ(missing, std::vector<int>{2}) << late.message();
        }
        EXPECT_TRUE(contains(late.message(),
                             "all_reduce(SUM, int64, 50000 elements), call 1 of group 'test'"))
            << late.message();
        EXPECT_EQ(probe.times, 1);
      }
      gate.arrive_and_wait();
      EXPECT_FALSE(group.run(all_reduce(mine, sum), soon()).ok());
    });
  }
}

TEST(DrivingThread, IsRunningWhileItComputes) {
  const auto computed = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return Duration(seconds(time.tv_sec)) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const Duration kWhile = 2 * tunables().driver_trust;
  DrivingThread driver;
  EXPECT_FALSE(driver.is_running(in(kWhile)));  // no thread yet
  TimePoint now = steady_clock().now();
  driver.note_driving(now);
  EXPECT_TRUE(driver.is_running(now));
  for (int turn = 0; turn < 3; ++turn) {
    for (const Duration until = computed() + kWhile; computed() < until;) {
    }
    now += kWhile;
    EXPECT_TRUE(driver.is_running(now));
  }
  now += std::chrono::hours(1);  // during which it computes no more than this test
  EXPECT_FALSE(driver.is_running(now));
  driver.note_driving(now);
  EXPECT_TRUE(driver.is_running(now));
  std::thread([&] { driver.note_driving(now); }).join();
  EXPECT_FALSE(driver.is_running(now + kWhile));  // it has ended
}

// Each rank first waits in another group and drives only that one; the progress thread drives the
// other.
TEST(Queue, ADrivingThreadMayWaitInEitherGroup) {
  for (Wire wire : testing::kWires) {
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group groups[] = {make(fabric, {0, 1}, "a"), make(fabric, {0, 1}, "b")};
      ASSERT_TRUE(groups[0] && groups[1]);
      const Values mine(300'000, 1);
      Values out[2] = {Values(mine.size()), Values(mine.size())};
      const std::shared_ptr<void> driving[] = {groups[0]->manual_progress(),
                                               groups[1]->manual_progress()};
      const PendingRef pending[] = {groups[0]->start(all_reduce(mine, out[0]), soon()),
                                    groups[1]->start(all_reduce(mine, out[1]), soon())};
      for (const int each : {rank, 1 - rank}) {
        const Status status = pending[each]->wait(soon());
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(out[each].back(), 2);
      }
    });
  }
}

TEST(Queue, AWaitsOwnLimitLeavesTheCallGoing) {
  std::barrier gate(2);
  with_group(2, Wire::loopback, [&](int rank, Communicator& group) {
    const Values in_values{rank + 1};
    Values out(1);
    if (rank == 1) gate.arrive_and_wait();
    const auto pending = group.start(all_reduce(in_values, out), soon());
    if (rank == 0) {
      EXPECT_EQ(pending->wait(in(milliseconds(20))).code(), Code::timed_out);
      EXPECT_FALSE(pending->done());
      gate.arrive_and_wait();
    }
    EXPECT_TRUE(pending->wait(soon()).ok());
    EXPECT_EQ(out[0], 3);
  });
}

// Two groups used from two threads, and from one thread in opposite orders.
TEST(Queue, TwoGroupsInOppositeOrdersDoNotDeadlock) {
  for (Wire wire : testing::kWires) {
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group a = make(fabric, {0, 1}, "a");
      const Group b = make(fabric, {1, 0}, "b");
      ASSERT_TRUE(a && b);
      Values one(20'000), two(20'000);
      const Values mine(20'000, 1);
      for (int round = 0; round < 10; ++round) {
        Group first = rank == 0 ? a : b;
        Group second = rank == 0 ? b : a;
        const auto x = first->start(all_reduce(mine, one), soon());
        const auto y = second->start(all_reduce(mine, two), soon());
        ASSERT_TRUE(x->wait(soon()).ok());
        ASSERT_TRUE(y->wait(soon()).ok());
      }
      const auto loop = [&](Communicator& group, Values& out) {
        for (int round = 0; round < 50; ++round) {
          const Status status = group.run(all_reduce(mine, out), soon());
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_EQ(out[19'999], 2);
        }
      };
      std::thread other([&] { loop(*b, two); });
      loop(*a, one);
      other.join();
    });
  }
}

TEST(Queue, ManyThreadsMayWaitForOneGroup) {
  with_group(2, Wire::shm, [](int, Communicator& group) {
    constexpr int kCalls = 40;
    std::vector<Values> out(kCalls, Values(2000));
    const Values in(2000, 1);
    std::vector<PendingRef> pending;
    for (auto& values : out) pending.push_back(group.start(all_reduce(in, values), soon()));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = kCalls - 1 - t; i >= 0; i -= 4)
          EXPECT_TRUE(pending[static_cast<std::size_t>(i)]->wait(soon()).ok());
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& values : out) EXPECT_EQ(values[1999], 2);
  });
}

}  // namespace
}  // namespace muster::collective
