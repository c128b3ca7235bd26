// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/fabric.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "core/transport/link/link_protocol.h"
#include "core/transport/testing/loopback_job.h"
#include "core/wait/spin_wait.h"

namespace muster::transport {
namespace {

class Loopback : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Loopback, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "region" : "streams"; });

TEST_P(Loopback, CarriesMessagesOfEverySize) {
  LoopbackJob job(2, GetParam());
  job.run([](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    const int peer = 1 - fabric.rank();
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{72}, kEagerBytes, kEagerBytes + 1,
          std::size_t{300'000}, std::size_t{3'000'017}}) {
      const std::string mine = pattern(bytes, bytes + static_cast<std::size_t>(fabric.rank()));
      std::string theirs(bytes, 'x');
      const TransferRef receive = channel.receive(peer, 7, writable(theirs), {});
      const TransferRef send = channel.send(peer, 7, as_bytes(mine), {});
      ASSERT_TRUE(finish(fabric, send).ok()) << send->status().message();
      ASSERT_TRUE(finish(fabric, receive).ok()) << receive->status().message();
      EXPECT_EQ(theirs, pattern(bytes, bytes + static_cast<std::size_t>(peer)));
      EXPECT_EQ(receive->source(), peer);
      EXPECT_EQ(receive->bytes(), bytes);
    }
  });
}

TEST_P(Loopback, PassesAMessageRoundARing) {
  LoopbackJob job(5, GetParam());
  job.run([](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    const int next = (fabric.rank() + 1) % 5;
    const int previous = (fabric.rank() + 4) % 5;
    for (int round = 0; round < 200; ++round) {
      const std::string mine = pattern(500, static_cast<std::size_t>(round * 5 + fabric.rank()));
      std::string theirs(500, 'x');
      const TransferRef send = channel.send(next, 0, as_bytes(mine), {});
      ASSERT_TRUE(finish(fabric, channel.receive(previous, 0, writable(theirs), {})).ok());
      ASSERT_TRUE(finish(fabric, send).ok());
      ASSERT_EQ(theirs, pattern(500, static_cast<std::size_t>(round * 5 + previous)));
    }
  });
}

// spec: E2 a receive from any rank tells who sent the message
TEST_P(Loopback, ReceivesFromAnyRank) {
  LoopbackJob job(4, GetParam());
  job.run([](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    if (fabric.rank() != 0) {
      const std::string mine =
          pattern(fabric.rank() == 1 ? 100'000 : 100, static_cast<std::size_t>(fabric.rank()));
      EXPECT_TRUE(finish(fabric, channel.send(0, 3, as_bytes(mine), {})).ok());
      return;
    }
    std::set<int> sources;
    for (int i = 0; i < 3; ++i) {
      std::string got(100'000, 'x');
      const TransferRef receive = channel.receive(kAnyMember, 3, writable(got), {}, false);
      ASSERT_TRUE(finish(fabric, receive).ok()) << receive->status().message();
      sources.insert(receive->source());
      EXPECT_EQ(got.substr(0, receive->bytes()),
                pattern(receive->bytes(), static_cast<std::size_t>(receive->source())));
    }
    EXPECT_EQ(sources, (std::set{1, 2, 3}));
  });
}

// Threads of one rank use channels of their own at the same time, opened in different orders on
// different ranks; large and small messages are mixed, and every thread waits in its own way.
TEST_P(Loopback, ThreadsShareAFabric) {
  constexpr int kRanks = 3;
  constexpr int kThreads = 3;
  LoopbackJob job(kRanks, GetParam());
  job.run([&](Fabric& fabric) {
    std::vector<std::shared_ptr<Channel>> channels(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      const int which = (i + fabric.rank()) % kThreads;
      auto made = fabric.open(static_cast<std::uint32_t>(which + 1), {0, 1, 2});
      ASSERT_TRUE(made.ok());
      channels[static_cast<std::size_t>(which)] = *made;
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        Channel& channel = *channels[static_cast<std::size_t>(t)];
        const int next = (fabric.rank() + 1 + t % 2) % kRanks;
        const int previous = (fabric.rank() + kRanks - 1 - t % 2) % kRanks;
        for (std::uint64_t step = 0; step < 60; ++step) {
          const std::size_t bytes = step % 7 == 3 ? 500'000 : step * 700;
          const auto seed = [&](int rank) {
            return step * 100 + static_cast<std::uint64_t>(t * 10 + rank);
          };
          const std::string mine = pattern(bytes, seed(fabric.rank()));
          std::string theirs(bytes, 'x');
          const TransferRef send = channel.send(next, step, as_bytes(mine), {});
          const TransferRef receive = channel.receive(previous, step, writable(theirs), {});
          const Status status = finish(fabric, t % 2 == 0 ? receive : send);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_TRUE(finish(fabric, t % 2 == 0 ? send : receive).ok());
          ASSERT_TRUE(theirs == pattern(bytes, seed(previous)));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_P(Loopback, FailureReachesEveryMemberWithItsFirstCause) {
  LoopbackJob job(5, GetParam());
  std::barrier ready(5);
  job.run([&](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    std::string got(10, 'x');
    const TransferRef receive = channel.receive((fabric.rank() + 1) % 5, 1, writable(got), {});
    ready.arrive_and_wait();
    if (fabric.rank() == 3)
      channel.fail(Status(Code::timed_out, "rank 2 has not come to the barrier", {2}));
    const Status status = finish(fabric, receive);
    EXPECT_EQ(status.code(), Code::timed_out);
    EXPECT_EQ(status.ranks(), std::vector<int>{2});
    EXPECT_EQ(channel.failure().message(), "rank 2 has not come to the barrier");
    channel.fail(Status(Code::internal, "a later cause"));
    EXPECT_EQ(finish(fabric, channel.send((fabric.rank() + 1) % 5, 1, as_bytes("late"), {})).code(),
              Code::timed_out);
    ready.arrive_and_wait();
  });
}

TEST_P(Loopback, ADeadRankIsNamedByAll) {
  LoopbackJob job(4, GetParam());
  std::barrier ready(4);
  job.run([&](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    std::string got(10, 'x');
    const TransferRef receive = channel.receive((fabric.rank() + 1) % 4, 1, writable(got), {});
    ready.arrive_and_wait();
    if (fabric.rank() == 2) {
      job.hub->kill(2);
      return;
    }
    const Status status = finish(fabric, receive);
    EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
    EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
    EXPECT_EQ(fabric.death_of(2).ranks(), std::vector<int>{2});
  });
}

// Whether a thread that waits for `limit` lies down meanwhile, of whose waiting `look` is asked.
bool lies_down(Duration limit, const std::function<void()>& look) {
  LoopbackJob job(2, true);
  bool lay = false;
  job.run([&](Fabric& fabric) {
    if (fabric.rank() != 0) return;
    const shm::Mailbox& mine = fabric.region()->mailbox(0);
    fabric.wait(
        [&] {
          look();
          lay = lay || mine.sleepers.load() > 0;
          return lay;
        },
        steady_clock().now() + limit);
  });
  return lay;
}

TEST(Fabric, WhoGetsOnDoesNotSleep) {
  EXPECT_TRUE(lies_down(std::chrono::minutes(1), [] {}));
  EXPECT_FALSE(lies_down(std::chrono::milliseconds(50), note_progress));
  take_progress();
  note_progress();
  EXPECT_TRUE(take_progress());
  EXPECT_FALSE(take_progress()) << "taken once";
}

}  // namespace
}  // namespace muster::transport
