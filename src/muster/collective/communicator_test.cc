// Calls that are queued; deadlines, disagreements, ends.
#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <future>

#include "muster/collective/communicator_test_job.h"
#include "muster/collective/driving_thread.h"
#include "muster/testing/scratch_folder.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

// ---- the queue -------------------------------------------------------------------------------------------------------

// spec: F1 async_op; a blocking call drives earlier ones first
TEST(Queue, StartedCallsRunInTheirOrder) {
  for (Wire wire : testing::kWires) {
    with_group(3, wire, [](int rank, Communicator& group) {
      constexpr std::size_t kCalls = 12;
      std::vector<Values> in(kCalls), out(kCalls);
      const auto right = [&](std::size_t i) { return out[i] == Values(in[i].size(), 3 + 3 * static_cast<int>(i)); };
      std::vector<PendingRef> pending;
      std::array<std::atomic<int>, kCalls> called{}, early{};
      for (std::size_t i = 0; i < kCalls; ++i) {
        in[i].assign(i % 2 == 0 ? 3 : 30'000, rank + static_cast<int>(i));
        out[i].resize(in[i].size());
        pending.push_back(group.start(all_reduce(in[i], out[i]), soon()));
        // Callbacks may pass each other where they run on different threads; what they stand for may not.
        pending.back()->when_done([&, i](const Status&) {
          called[i].fetch_add(1);
          for (std::size_t before = 0; before <= i; ++before) early[i].fetch_add(right(before) ? 0 : 1);
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
      ASSERT_TRUE(group.close(soon()).ok());  // no callback is under way any more
      for (std::size_t i = 0; i < kCalls; ++i) {
        EXPECT_EQ(called[i].load(), 1) << "call " << i;
        EXPECT_EQ(early[i].load(), 0) << "call " << i << " was told to be done before others that stood before it";
      }
    });
  }
}

TEST(Queue, DroppedAndUnwaitedCallsGoOn) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values out(40'000);
      const Values in(40'000, rank + 1);
      std::atomic<bool> done{false};
      group.start(all_reduce(in, out), soon())->when_done([&](const Status& status) { done.store(status.ok()); });
      while (!done.load()) std::this_thread::yield();  // the progress thread alone drives it
      EXPECT_EQ(out[39'999], 3);
    });
  }
}

// Both ranks look after their calls themselves for a while; what one leaves behind, the progress thread ends.
TEST(Queue, WhoDrivesHereMayLeave) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values in(40'000, rank + 1);
      Values one(40'000), two(40'000);
      auto driving = group.drive_here();
      const auto first = group.start(all_reduce(in, one), soon());
      while (!first->done()) std::this_thread::yield();
      EXPECT_EQ(one[39'999], 3);
      std::atomic<bool> done{false};
      group.start(all_reduce(in, two), soon())->when_done([&](const Status& status) { done.store(status.ok()); });
      driving.reset();
      while (!done.load()) std::this_thread::yield();
      EXPECT_EQ(two[39'999], 3);
    });
  }
}

// Both ranks have said that they drive, and stand still elsewhere.
TEST(Queue, WhoDrivesHereAndStandsStillIsHelped) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values in(300'000, rank + 1);
      Values out(in.size());
      const auto driving = group.drive_here();
      std::promise<Status> ended;
      group.start(all_reduce(in, out), soon())->when_done([&](const Status& status) { ended.set_value(status); });
      EXPECT_TRUE(ended.get_future().get().ok());
      EXPECT_EQ(out.back(), 3);
    });
  }
}

// Rank 1 returns and ends the group while rank 0, which has told its part, has not looked at anything yet. The second time rank 1 gives
// more than stands beside a line.
TEST(Queue, AFailureDoesNotOvertakeWhatCameBeforeIt) {
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
      struct UntilItHasFailed final : Meanwhile {
        explicit UntilItHasFailed(Communicator& told) : group(told) {}
        TimePoint begun() noexcept override {
          const TimePoint deadline = soon();
          while (group.failure().ok() && steady_clock().now() < deadline) group.channel().fabric().poll();
          return deadline;
        }
        Communicator& group;
      } meanwhile(group);
      const Status status = group.run(args, true, meanwhile);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(second, Values(count, 2));
      const Status next = group.run(all_reduce(mine, first), soon());
      EXPECT_TRUE(contains(next.message(), "has all it wants")) << next.message();
    });
  }
}

// What it did before it began to wait belongs to the time that a deadline allows.
TEST(Queue, AMissedDeadlineTellsTheWholeOfTheWait) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{50'000}}) {
    with_group(2, Wire::shm, [&](int rank, Communicator& group) {
      if (rank == 1) return;
      struct BegunLongAgo final : Meanwhile {
        TimePoint begun() noexcept override { return steady_clock().now(); }
        TimePoint since() const noexcept override { return steady_clock().now() - seconds(72'000); }
      } meanwhile;
      Values mine(count, 1), sum(count);
      const Status status = group.run(all_reduce(mine, sum), true, meanwhile);
      EXPECT_EQ(status.code(), Code::timed_out);
      EXPECT_TRUE(contains(status.message(), "rank 0 waited 1200 min")) << status.message();
    });
  }
}

/// What a caller is told of its call, and what it does then.
struct Told final : Meanwhile {
  explicit Told(std::function<void()> then = {}, Duration limit = seconds(20)) : then(std::move(then)), limit(limit) {}
  TimePoint begun() noexcept override {
    ++times;
    if (then) then();
    return in(limit);
  }
  std::function<void()> then;
  Duration limit;
  int times = 0;
};

// Three ranks with a core each: a call too large to stand beside a line has its caller's thread for a moment, and stands in the queue after
// that.
TEST(Queue, ALargerCallIsToldOnce) {
  with_group(3, Wire::region, [](int rank, Communicator& group) {
    for (const std::size_t count : {5'000, 50'000, 500'000}) {
      for (int turn = 0; turn < 20; ++turn) {
        Values mine(count, rank + turn), sum(count);
        Told told;
        const Status status = group.run(all_reduce(mine, sum), true, told);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(told.times, 1);
        EXPECT_FALSE(told.at_once) << "more than a line was to be waited for";
        EXPECT_EQ(sum, Values(count, 3 + 3 * turn));
      }
    }
  });
}

// Rank 2 comes when the others' calls have left their threads' hands for the queue: another thread of theirs has found it there.
TEST(Queue, ALargerCallThatMustWaitLetsOthersIn) {
  constexpr std::size_t kCount = 50'000;
  std::barrier gate(3);
  with_group(3, Wire::region, [&](int rank, Communicator& group) {
    Values mine(kCount, rank), sum(kCount), next{rank}, next_sum(1);
    std::thread behind;
    Told told([&] {
      if (rank == 2) return;
      behind = std::thread([&] {
        const auto second = group.start(all_reduce(next, next_sum), soon());
        EXPECT_EQ(second->wait(in(milliseconds(20))).code(), Code::timed_out);  // it drives both meanwhile
        gate.arrive_and_wait();
        EXPECT_TRUE(second->wait(soon()).ok());
      });
    });
    if (rank == 2) gate.arrive_and_wait();
    const Status status = group.run(all_reduce(mine, sum), true, told);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(told.times, 1);
    if (rank == 2) {
      EXPECT_TRUE(group.run(all_reduce(next, next_sum), soon()).ok());
    }
    if (rank != 2 && told.times == 0) gate.arrive_and_drop();
    if (behind.joinable()) behind.join();
    EXPECT_EQ(sum, Values(kCount, 3));
    EXPECT_EQ(next_sum[0], 3);
  });
}

// Its deadline may pass before a round trip's time has, or after.
TEST(Queue, ALargerCallThatIsMissedNamesWhoIsMissing) {
  for (const Duration limit : {Duration::zero(), Duration(milliseconds(200))}) {
    std::barrier both(2), gate(3);
    with_group(3, Wire::region, [&](int rank, Communicator& group) {
      Values mine(50'000, rank), sum(mine.size());
      if (rank != 2) {
        Told told([&] { both.arrive_and_wait(); }, limit);
        const Status late = group.run(all_reduce(mine, sum), true, told);
        EXPECT_EQ(late.code(), Code::timed_out) << late.message();
        const std::vector<int> missing = late.ranks();  // without time to wait in, whoever looks first misses everybody
        EXPECT_TRUE(std::find(missing.begin(), missing.end(), 2) != missing.end()) << late.message();
        if (limit > Duration::zero()) {
          EXPECT_EQ(missing, std::vector<int>{2}) << late.message();
        }
        EXPECT_TRUE(contains(late.message(), "all_reduce(SUM, int64, 50000 elements), call 1 of group 'test'")) << late.message();
        EXPECT_EQ(told.times, 1);
      }
      gate.arrive_and_wait();
      EXPECT_FALSE(group.run(all_reduce(mine, sum), soon()).ok());
    });
  }
}

TEST(DrivingThread, IsAtWorkWhileItComputes) {
  const auto computed = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return Duration(seconds(time.tv_sec)) + std::chrono::nanoseconds(time.tv_nsec);
  };
  constexpr Duration kWhile = 2 * DrivingThread::kTrusted;
  DrivingThread driver;
  EXPECT_FALSE(driver.is_at_work(in(kWhile)));  // nobody yet
  TimePoint now = steady_clock().now();
  driver.is_here(now);
  EXPECT_TRUE(driver.is_at_work(now));
  for (int turn = 0; turn < 3; ++turn) {
    for (const Duration until = computed() + kWhile; computed() < until;) {
    }
    now += kWhile;
    EXPECT_TRUE(driver.is_at_work(now));
  }
  now += std::chrono::hours(1);  // in which it computes no more than this test
  EXPECT_FALSE(driver.is_at_work(now));
  driver.is_here(now);
  EXPECT_TRUE(driver.is_at_work(now));
  std::thread([&] { driver.is_here(now); }).join();
  EXPECT_FALSE(driver.is_at_work(now + kWhile));  // it has ended
}

// Each rank waits in another group first, and drives only that; the other one is looked after all the same.
TEST(Queue, WhoDrivesTwoGroupsMayWaitInEither) {
  for (Wire wire : testing::kWires) {
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group groups[] = {make(fabric, {0, 1}, "a"), make(fabric, {0, 1}, "b")};
      ASSERT_TRUE(groups[0] && groups[1]);
      const Values mine(300'000, 1);
      Values out[2] = {Values(mine.size()), Values(mine.size())};
      const std::shared_ptr<void> driving[] = {groups[0]->drive_here(), groups[1]->drive_here()};
      const PendingRef pending[] = {groups[0]->start(all_reduce(mine, out[0]), soon()), groups[1]->start(all_reduce(mine, out[1]), soon())};
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
        for (int i = kCalls - 1 - t; i >= 0; i -= 4) EXPECT_TRUE(pending[static_cast<std::size_t>(i)]->wait(soon()).ok());
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& values : out) EXPECT_EQ(values[1999], 2);
  });
}

// ---- deadlines, disagreements, ends ----------------------------------------------------------------------------------

TEST(Failure, ADeadlineNamesWhoIsMissing) {
  for (bool region : {false, true}) {
    std::barrier gate(3);
    with_group(
        3, Wire::region,
        [&](int rank, Communicator& group) {
          Values out(1);
          ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
          if (rank != 1) {
            const TimePoint began = steady_clock().now();
            const Status late = group.run(all_reduce({1}, out), in(milliseconds(200)));
            EXPECT_LT(steady_clock().now() - began, seconds(10));
            EXPECT_EQ(late.code(), Code::timed_out) << late.message();
            EXPECT_EQ(late.ranks(), std::vector<int>{1}) << late.message();
            EXPECT_TRUE(contains(late.message(), "all_reduce(SUM, int64, 1 element), call 2 of group 'test'")) << late.message();
            EXPECT_TRUE(contains(late.message(), "rank 1")) << late.message();
          }
          gate.arrive_and_wait();
          if (rank == 1) {
            // In a region all that it needs of the missed call is there; then it learns that it was waited for.
            Status next = group.run(all_reduce({1}, out), soon());
            if (next.ok()) next = group.run(all_reduce({1}, out), soon());
            EXPECT_EQ(next.code(), Code::timed_out) << next.message();
            EXPECT_TRUE(contains(next.message(), "rank 1")) << next.message();
          }
          EXPECT_FALSE(group.failure().ok());
        },
        region);
  }
}

// spec: F18 ranks that call different collectives, or the same with different dtype, op, root or size: every rank fails, both calls named
TEST(Failure, DifferentCallsAreNamedOnEveryRank) {
  struct Case {
    const char* what;
    std::function<Args(Values&in, Values&out)> usual, odd;
    const char* usual_text;
    const char* odd_text;
  };
  const auto sum = [](Values& in, Values& out) { return all_reduce(in, out); };
  const std::vector<Case> cases{
      {"operation", sum, [](Values&, Values& out) { return broadcast(out, 0); }, "all_reduce(", "broadcast("},
      {"dtype", sum,
       [](Values& in, Values& out) {
         Args args = all_reduce(in, out);
         args.dtype = DType::float64;
         return args;
       },
       "int64", "float64"},
      {"reduction", sum, [](Values& in, Values& out) { return all_reduce(in, out, Reduce::max); }, "SUM", "MAX"},
      {"size", sum,
       [](Values& in, Values& out) {
         Args args = all_reduce(in, out);
         args.inputs[0] = args.inputs[0].first(8);
         args.outputs[0] = args.outputs[0].first(8);
         return args;
       },
       "4 elements", "1 element)"},
      {"root, each waiting for the other", [](Values&, Values& out) { return broadcast(out, 0); },
       [](Values&, Values& out) { return broadcast(out, 1); }, "root 0", "root 1"},
  };
  for (bool region : {false, true}) {
    for (const Case& each : cases) {
      // The odd one is 0, so that with different roots 0 waits for 1 and 1 for 0.
      with_group(
          3, Wire::region,
          [&](int rank, Communicator& group) {
            Values in(4, 1), out(4);
            const TimePoint began = steady_clock().now();
            Status status = group.run((rank == 0 ? each.odd : each.usual)(in, out), soon());
            if (status.ok()) status = group.close(soon());  // it had returned before anybody knew
            EXPECT_LT(steady_clock().now() - began, seconds(10));
            EXPECT_EQ(status.code(), Code::mismatch) << each.what << " on rank " << rank << ": " << status.message();
            EXPECT_TRUE(contains(status.message(), each.usual_text) && contains(status.message(), each.odd_text))
                << each.what << ": " << status.message();
          },
          region);
    }
  }
}

// By its own size the odd one exchanges with the root, or the root with all, while the others use a tree: messages come for which nobody
// waits. spec: F18 different sizes, where they choose different algorithms
TEST(Failure, DifferentSizesThatChooseDifferentAlgorithmsAreNamed) {
  constexpr int kRanks = 8;
  const testing::ScratchFolder scratch;
  std::ofstream(scratch.file("tuning")) << "version = 1\nlinks.gather.8 = tree <= 256, direct\nlinks.scatter.8 = tree <= 256, direct\n";
  const Variable tuning("MUSTER_TUNING", scratch.file("tuning"));
  for (const Op op : {Op::gather, Op::scatter}) {
    for (int odd = 0; odd < kRanks; ++odd) {
      with_group(kRanks, Wire::loopback, [&](int rank, Communicator& group) {
        const std::size_t count = rank == odd ? 8 : 4;
        Values mine(count), all(kRanks * count);
        Status status = group.run(pieces(op, mine, all, 0, group), soon());
        if (status.ok()) status = group.close(soon());  // it had returned before anybody knew
        EXPECT_EQ(status.code(), Code::mismatch) << "rank " << rank << ", rank " << odd << " is odd: " << status.message();
        EXPECT_TRUE(contains(status.message(), "4 elements") && contains(status.message(), "8 elements")) << status.message();
      });
    }
  }
}

// spec: F18 sizes may differ where the operation lets them, but all must give the same ones
TEST(Failure, DifferentSplitsAreNamed) {
  with_group(2, Wire::loopback, [](int rank, Communicator& group) {
    Values mine(3), a(rank == 0 ? 3 : 2), b(3);
    Args args;
    args.op = Op::all_gather;
    args.dtype = DType::int64;
    args.inputs = {bytes(mine)};
    args.outputs = {bytes(a), bytes(b)};
    if (rank == 1) args.outputs[1] = bytes(b);
    const Status status = group.run(args, soon());
    EXPECT_EQ(status.code(), Code::mismatch) << status.message();
    EXPECT_TRUE(contains(status.message(), "6 elements in all") && contains(status.message(), "5 elements in all")) << status.message();
  });
}

// spec: F18 a skipped call that leaves identical ones is named at destroy
TEST(Failure, ASkippedLastCallIsNamedAtClose) {
  for (bool region : {false, true}) {
    with_group(
        3, Wire::region,
        [](int rank, Communicator& group) {
          Values value(1);
          // A broadcast's root leaves at once, so nothing but the comparison at the end shows that rank 2 did not come.
          ASSERT_TRUE(group.run(broadcast(value, 0), soon()).ok());
          Status status;
          if (rank != 2) status = group.run(broadcast(value, 0), soon());
          if (status.ok()) status = group.close(soon());
          EXPECT_EQ(status.code(), Code::mismatch) << status.message();
          EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
          EXPECT_TRUE(contains(status.message(), "rank 2")) << status.message();
        },
        region);
  }
}

// spec: F18 a skipped call is named while another rank still waits in it
TEST(Failure, ASkippedCallIsNamedWhileOthersWaitInIt) {
  std::barrier gate(3);
  with_group(3, Wire::loopback, [&](int rank, Communicator& group) {
    Values out(1);
    ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
    gate.arrive_and_wait();
    const TimePoint began = steady_clock().now();
    const Status status = rank == 2 ? group.close(in(seconds(60))) : group.run(all_reduce({1}, out), in(seconds(60)));
    EXPECT_LT(steady_clock().now() - began, seconds(20));
    EXPECT_EQ(status.code(), Code::mismatch) << status.message();
    EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
    EXPECT_TRUE(contains(status.message(), "skipped a call")) << status.message();
  });
}

TEST(Failure, AnAbortEndsTheCallsOfAllMembers) {
  for (Wire wire : testing::kWires) {
    std::barrier gate(3);
    with_group(3, wire, [&](int rank, Communicator& group) {
      Values out(1);
      ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
      gate.arrive_and_wait();
      if (rank == 1) group.abort("the test wants it");
      const Status status = group.run(all_reduce({1}, out), in(seconds(60)));
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
      EXPECT_TRUE(contains(status.message(), "the test wants it")) << status.message();
    });
  }
}

// A child made by fork has the parent's memory, shared regions too: nothing that it calls may reach the group.
TEST(Failure, AForkedChildIsKeptOutOfItsParentsGroups) {
  for (Wire wire : {Wire::loopback, Wire::region, Wire::shm}) {
    std::barrier gate(2);
    with_group(2, wire, [&](int rank, Communicator& group) {
      Values out(3);
      ASSERT_TRUE(group.run(all_reduce({1, 2, 3}, out), soon()).ok());
      gate.arrive_and_wait();
      if (rank == 0) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
          const Values in{7, 7, 7};
          const bool collective = group.run(all_reduce(in, out), soon()).code() == Code::aborted;
          const bool started = group.start(all_reduce(in, out), soon())->wait(soon()).code() == Code::aborted;
          const bool sends = group.send(1, 0, bytes(in), DType::int64, soon())->wait(soon()).code() == Code::aborted;
          group.refuse(Op::barrier);
          group.abort("a child's wish");
          ::_exit(collective && started && sends && group.close(soon()).ok() ? 0 : 1);
        }
        int result = -1;
        EXPECT_EQ(::waitpid(child, &result, 0), child);
        EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0) << result;
      }
      gate.arrive_and_wait();
      ASSERT_TRUE(group.run(all_reduce({4, 5, 6}, out), soon()).ok());
      EXPECT_EQ(out, (Values{8, 10, 12}));
    });
  }
}

TEST(Failure, ADeadRankIsNamedByAllSurvivors) {
  struct Case {
    Op op;
    int victim;
    std::size_t count;
  };
  // Along the tree of four, rank 2 passes on what rank 3 gives or gets.
  const Variable by_tree("MUSTER_ALGORITHM", "gather:tree,scatter:tree");
  std::vector<Case> cases{{Op::all_reduce, 3, 30'000}};
  for (const Op op : {Op::gather, Op::scatter}) {
    for (const int victim : {0, 2, 3}) {
      for (const std::size_t count : {1, 30'000}) cases.push_back({op, victim, count});
    }
  }
  for (Wire wire : {Wire::loopback, Wire::region}) {
    for (const Case& each : cases) {
      testing::RankThreadsOptions options;
      options.ranks = 4;
      options.wire = wire;
      options.hub = transport::make_loopback_hub(4, wire == Wire::region, 4);
      std::barrier gate(4);
      run_ranks(options, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
        const Group group = make(fabric, all_of(4), "test");
        ASSERT_TRUE(group);
        Values in(each.count, 1), out(each.count), all(4 * each.count, 1);
        const Args call = each.op == Op::all_reduce ? all_reduce(in, out) : pieces(each.op, in, all, 0, *group);
        for (int round = 0; round < 5; ++round) ASSERT_TRUE(group->run(call, soon()).ok());
        gate.arrive_and_wait();
        if (rank == each.victim) {
          options.hub->kill(rank);
          return;
        }
        Status status;
        while (status.ok()) status = group->run(call, soon());
        const std::string dead = "rank " + std::to_string(each.victim);
        EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
        EXPECT_EQ(status.ranks(), std::vector<int>{each.victim}) << status.message();
        EXPECT_TRUE(contains(status.message(), std::string(info(each.op).name) + "(") && contains(status.message(), "group 'test'") &&
                    contains(status.message(), dead))
            << status.message();
      });
    }
  }
}

TEST(Failure, InvalidCallsAreFoundBeforeAnythingIsSent) {
  with_group(2, Wire::loopback, [](int rank, Communicator& group) {
    Values in(4), out(4);
    const auto expect = [&](Args args, Code code, const std::vector<std::string>& parts) {
      const Status status = group.run(args, soon());
      EXPECT_EQ(status.code(), code) << status.message();
      for (const auto& part : parts) EXPECT_TRUE(contains(status.message(), part)) << status.message() << " lacks " << part;
      EXPECT_EQ(group.start(args, soon())->wait(soon()).code(), code);
    };
    Args args = all_reduce(in, out);
    args.outputs[0] = args.outputs[0].first(24);
    expect(args, Code::invalid_argument, {"all_reduce", "24", "32", "group 'test'"});
    args = all_reduce(in, out);
    args.inputs.clear();
    expect(args, Code::invalid_argument, {"1 input", "got 0"});
    args = all_reduce(in, out);
    args.inputs[0] = args.inputs[0].first(12);
    expect(args, Code::invalid_argument, {"12 bytes", "int64"});
    args = all_reduce(in, out);
    args.inputs[0] = std::as_bytes(std::span(out)).first(24);
    args.outputs[0] = args.outputs[0].subspan(8);
    expect(args, Code::invalid_argument, {"overlapping"});
    args = all_reduce(in, out);
    args.dtype = DType::complex64;
    args.reduce = Reduce::max;
    expect(args, Code::unsupported, {"MAX", "complex64"});
    expect(broadcast(out, 2), Code::invalid_argument, {"broadcast", "root", "got 2"});
    args = broadcast(out, 0);
    args.op = Op::all_to_all;
    args.inputs = {bytes(std::as_const(in))};
    expect(args, Code::invalid_argument, {"2 inputs", "got 1"});
    args = Args();
    args.op = Op::reduce_scatter;
    args.dtype = DType::int64;
    args.inputs = {bytes(std::as_const(in)), bytes(std::as_const(in))};
    args.outputs = {bytes(out).first(8)};
    expect(args, Code::invalid_argument, {"reduce_scatter", "8 bytes", "32"});
    EXPECT_EQ(group.sequence(), 0u);
    ASSERT_TRUE(group.run(all_reduce({rank}, out = Values(1)), soon()).ok()) << "the group is as good as new";
  });
}

}  // namespace
}  // namespace muster::collective
