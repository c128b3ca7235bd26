// SPDX-License-Identifier: BSD-3-Clause
// Deaths, deadlines and ends in whole jobs, whose ranks are threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "core/transport/testing/loopback_job.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class FailingJob : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, FailingJob, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "region" : "streams"; });

// A rank is killed at a random moment of a ring exchange of all sizes: every survivor names it,
// whether linked to it or not.
TEST_P(FailingJob, AKillInTheMiddleNamesTheCulpritEverywhere) {
  std::mt19937_64 random(muster::testing::test_seed());
  const int rounds = muster::testing::test_rounds(12, 200);
  for (int round = 0; round < rounds; ++round) {
    constexpr int kRanks = 6;
    LoopbackJob job(kRanks, GetParam());
    const int victim = static_cast<int>(random() % kRanks);
    const int steps = static_cast<int>(random() % 40);
    const std::size_t bytes = round % 3 == 0 ? 100 : round % 3 == 1 ? 40'000 : 700'000;
    std::atomic<int> ended{0};
    job.run([&](Fabric& fabric) {
      Channel& channel = fabric.bootstrap();
      const std::string mine = pattern(bytes, static_cast<std::uint64_t>(fabric.rank()));
      std::string theirs(bytes, 'x');
      Status status;
      for (int step = 0; status.ok(); ++step) {
        if (fabric.rank() == victim && step == steps) {
          job.hub->kill(victim);
          break;
        }
        const TransferRef receive =
            channel.receive((fabric.rank() + kRanks - 1) % kRanks, static_cast<std::uint64_t>(step),
                            writable(theirs), {});
        const TransferRef send = channel.send((fabric.rank() + 1) % kRanks,
                                              static_cast<std::uint64_t>(step), as_bytes(mine), {});
        status = finish(fabric, receive);
        const Status sent =
            finish(fabric, send);  // in any case: until then its buffer is the fabric's
        if (status.ok()) status = sent;
      }
      if (fabric.rank() != victim) {
        EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
        EXPECT_EQ(status.ranks(), std::vector<int>{victim}) << status.message();
        EXPECT_EQ(channel.failure().ranks(), std::vector<int>{victim});
      }
      // Nobody leaves before all know.
      ++ended;
      fabric.wait([&] { return ended.load() == kRanks; }, soon());
    });
  }
}

TEST_P(FailingJob, ADeadlineOnOneRankReachesTheUnlinked) {
  constexpr int kRanks = 9;
  LoopbackJob job(kRanks, GetParam());
  std::atomic<int> ended{0};
  job.run([&](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    if (fabric.rank() == 4) channel.fail(Status(Code::timed_out, "rank 7 never came", {7}));
    EXPECT_TRUE(fabric.wait([&] { return channel.failed(); }, soon()));
    EXPECT_EQ(channel.failure().ranks(), std::vector<int>{7});
    ++ended;
    fabric.wait([&] { return ended.load() == kRanks; }, soon());
  });
}

TEST_P(FailingJob, AStoppedRankIsNamedByItsHeartbeat) {
  // A rank whose watcher does not run is as good as stopped: it is played by a fabric without
  // threads that nobody polls.
  LoopbackJob job(3, GetParam());
  job.options.heartbeat_limit =
      seconds(3);  // far more than a busy machine keeps a live rank's watcher from its turn
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      FabricOptions options = job.options;
      options.rank = rank;
      options.world_size = 3;
      options.threads = rank != 1;
      auto fabric = Fabric::create(
          options, job.hub->connector(rank),
          [&](const std::string& round, const std::string& text) {
            return Result<std::vector<std::string>>(job.hub->exchange(round, rank, text));
          });
      ASSERT_TRUE(fabric.ok());
      if (rank == 1) {
        const auto until = steady_clock().now() + milliseconds(200);
        while (steady_clock().now() < until) (*fabric)->poll();
        while (ended.load() < 2) std::this_thread::yield();
        return;
      }
      std::string got(1, 'x');
      const Status status =
          finish(**fabric, (*fabric)->bootstrap().receive(1, 0, writable(got), {}));
      EXPECT_EQ(status.code(), Code::peer_failed);
      EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
      EXPECT_NE(status.message().find("has not answered for"), std::string::npos)
          << status.message();
      ++ended;
      (*fabric)->wait([&] { return ended.load() == 2; }, soon());
    });
  }
  for (auto& thread : threads) thread.join();
}

// A forked child has copies of everything: it may neither hang nor speak in its parent's name.
TEST_P(FailingJob, AForkedChildIsKeptOut) {
  LoopbackJob job(2, GetParam());
  std::barrier both(2);
  job.run([&](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    both.arrive_and_wait();
    if (fabric.rank() == 0) {
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        std::string got(1, 'x');
        const bool sends = channel.send(1, 0, as_bytes("x"), {})->status().code() == Code::aborted;
        const bool receives =
            channel.receive(1, 0, writable(got), {})->status().code() == Code::aborted;
        const bool opens = fabric.open(1, {0, 1}).status().code() == Code::aborted;
        const bool waits = !fabric.wait([] { return false; }, soon());
        fabric.poll();
        fabric.~Fabric();  // the destructors of globals would
        _exit(sends && receives && opens && waits ? 0 : 1);
      }
      int result = -1;
      EXPECT_EQ(waitpid(child, &result, 0), child);
      EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0);
    }
    both.arrive_and_wait();
    std::string got(4, 'x');
    const TransferRef receive = channel.receive(1 - fabric.rank(), 0, writable(got), {});
    EXPECT_TRUE(finish(fabric, channel.send(1 - fabric.rank(), 0, as_bytes("well"), {})).ok());
    EXPECT_TRUE(finish(fabric, receive).ok());
    EXPECT_EQ(got, "well");
  });
}

TEST_P(FailingJob, RanksThatEndInGoodOrderDisturbNobody) {
  for (int round = 0; round < 20; ++round) {
    LoopbackJob job(5, GetParam());
    job.run([&](Fabric& fabric) {
      // Ranks 3 and 4 leave at once; the others go on.
      if (fabric.rank() >= 3) return;
      Channel& channel = fabric.bootstrap();
      for (std::uint64_t step = 0; step < 50; ++step) {
        std::string got(8, 'x');
        const TransferRef receive =
            channel.receive((fabric.rank() + 2) % 3, step, writable(got), {});
        EXPECT_TRUE(
            finish(fabric, channel.send((fabric.rank() + 1) % 3, step, as_bytes("12345678"), {}))
                .ok());
        const Status status = finish(fabric, receive);
        EXPECT_TRUE(status.ok()) << status.message();
      }
      EXPECT_FALSE(channel.failed()) << channel.failure().message();
    });
  }
}

}  // namespace
}  // namespace muster::transport
