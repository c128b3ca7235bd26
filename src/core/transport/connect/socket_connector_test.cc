// SPDX-License-Identifier: BSD-3-Clause
#include <fstream>
#include <string>

#include "core/transport/testing/connector_job.h"
#include "testing/limits.h"

namespace muster::transport {
namespace {

using namespace connector_test;

class SocketConnectorKinds : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, SocketConnectorKinds, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

TEST_P(SocketConnectorKinds, ProcessesTalkInEveryPair) {
  Blackboard board(4);
  run_processes(4, [&](int me) {
    TestRank rank(options_of(me, 4, GetParam()), board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(rank.connector().hosts(), std::vector<int>({0, 0, 0, 0}));
    EXPECT_EQ(rank.connector().region() != nullptr, GetParam());
    EXPECT_EQ(rank.connector().mailbox().pid.load(), static_cast<std::uint32_t>(::getpid()));
    all_talk(rank, me, 4, 300'000);
  });
}

TEST_P(SocketConnectorKinds, ThreadsTalkInEveryPair) {
  Blackboard board(4);
  run_threads(4, [&](int me) {
    TestRank rank(options_of(me, 4, GetParam()), board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    all_talk(rank, me, 4, 100'000);
    rank.barrier();
  });
}

TEST_P(SocketConnectorKinds, OneRankMeetsNobody) {
  Blackboard board(1);
  TestRank rank(options_of(0, 1, GetParam()), board);
  ASSERT_TRUE(rank.join().ok());
  EXPECT_EQ(rank.connector().hosts(), std::vector<int>({0}));
  EXPECT_EQ(rank.connector().region(), nullptr);
  EXPECT_FALSE(rank.connector().poll(steady_clock().now()));
}

// One side asks; the other is told all the same.
TEST_P(SocketConnectorKinds, StreamThatThePeerAskedForIsReported) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2, GetParam()), board);
    ASSERT_TRUE(rank.join().ok());
    if (me == 1) rank.connector().connect(0, soon());
    EXPECT_TRUE(rank.talk(1 - me, 20'000));
    rank.barrier();
  });
}

TEST(SocketConnector, ThreadsShareOneMapping) {
  Blackboard board(3);
  std::array<std::byte*, 3> seen{};
  run_threads(3, [&](int me) {
    TestRank rank(options_of(me, 3), board);
    ASSERT_TRUE(rank.join().ok());
    shm::HostRegion& region = *rank.connector().region();
    EXPECT_EQ(region.local_rank(), me);
    seen[static_cast<std::size_t>(me)] = region.at(0);
    // Their arena is one and the same as well.
    std::byte* const memory = (*shm::Arena::of_process())->allocate(64).value();
    EXPECT_EQ(
        region.arena_at((me + 1) % 3, *(*shm::Arena::of_process())->offset_of(memory, 64), 64),
        memory);
    (*shm::Arena::of_process())->free(memory);
    rank.barrier();
  });
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
}

TEST(SocketConnector, ProcessesSeeEachOthersSegmentsAndArenas) {
  Blackboard board(2);
  run_processes(2, [&](int me) {
    TestRank rank(options_of(me, 2), board);
    ASSERT_TRUE(rank.join().ok());
    shm::HostRegion& region = *rank.connector().region();
    // Each answers while the other asks: a thread polls, as a fabric's watcher does.
    std::atomic<bool> stop{false};
    std::thread watcher([&] { rank.until([&] { return stop.load(); }); });
    EXPECT_EQ(region.arena_at(1 - me, 0, 1), nullptr) << "no arena is there yet";
    rank.barrier();
    // Made after the ranks have met; having asked in vain before does no harm.
    shm::Arena& arena = **shm::Arena::of_process();
    std::byte* const memory = arena.allocate(100'000).value();
    std::memset(memory, 10 + me, 100'000);
    const std::string offset = std::to_string(*arena.offset_of(memory, 100'000));
    const auto offsets = rank.exchange(offset);
    const std::uint64_t there = std::stoull(offsets[static_cast<std::size_t>(1 - me)]);
    std::byte* const theirs = region.arena_at(1 - me, there, 100'000);
    rank.barrier();
    stop = true;
    watcher.join();
    ASSERT_NE(theirs, nullptr);
    EXPECT_EQ(theirs[0], static_cast<std::byte>(10 + 1 - me));
    EXPECT_EQ(theirs[99'999], static_cast<std::byte>(10 + 1 - me));
    EXPECT_EQ(region.arena_at(1 - me, there, 100'000), theirs) << "mapped once";
    EXPECT_EQ(region.arena_at(1 - me, UINT64_MAX, 1), nullptr);
    EXPECT_EQ(region.arena_at(7, 0, 1), nullptr);
    rank.barrier();
    // A push into a peer's arena is seen there.
    theirs[5] = std::byte{99};
    rank.barrier();
    EXPECT_EQ(memory[5], std::byte{99});
    if (me == 0) {
      const std::uint64_t segment = region.claim(1000).value();
      region.at(segment)[999] = std::byte{42};
      rank.exchange(std::to_string(segment));
    } else {
      EXPECT_EQ(region.at(std::stoull(rank.exchange("")[0]))[999], std::byte{42});
    }
    rank.barrier();
  });
}

TEST(SocketConnector, LabelsKeepRanksApartAsHosts) {
  Blackboard board(5);
  run_threads(5, [&](int me) {
    auto options = options_of(me, 5);
    options.host_label = me == 4 ? "c" : me % 2 == 0 ? "a" : "b";
    TestRank rank(options, board);
    ASSERT_TRUE(rank.join().ok());
    EXPECT_EQ(rank.connector().hosts(), std::vector<int>({0, 1, 0, 1, 2}));
    const std::vector<std::vector<int>> expected{{0, 2}, {1, 3}, {0, 2}, {1, 3}};
    if (me == 4) {
      EXPECT_EQ(rank.connector().region(), nullptr);
    } else {
      const auto ranks = rank.connector().region()->ranks();
      EXPECT_EQ(std::vector<int>(ranks.begin(), ranks.end()),
                expected[static_cast<std::size_t>(me)]);
      EXPECT_EQ(rank.connector().region()->local_rank(), me / 2);
    }
    if (me < 2) {
      EXPECT_TRUE(rank.linked(me + 2));
    }
    if (me == 2 || me == 3) {
      EXPECT_TRUE(rank.talk(me - 2, 1000));
    }
    if (me < 2) {
      EXPECT_TRUE(rank.talk(me + 2, 1000));
    }
    rank.barrier();
    if (me == 0) {
      EXPECT_TRUE(rank.linked(1));
    }
    if (me == 1) {
      EXPECT_TRUE(rank.until([&] { return rank.streams.contains(0); }));
    }
    if (me < 2) {
      EXPECT_EQ(rank.streams[1 - me]->kind(), std::string("tcp"));
    }
    rank.barrier();
  });
}

TEST(SocketConnector, SharedMemoryOfOneRankOnlyLeavesItOut) {
  Blackboard board(3);
  run_threads(3, [&](int me) {
    TestRank rank(options_of(me, 3, me != 1), board);
    ASSERT_TRUE(rank.join().ok());
    EXPECT_EQ(rank.connector().region() != nullptr, me != 1);
    if (me == 0) {
      EXPECT_TRUE(rank.linked(1));
    }
    if (me == 1) {
      EXPECT_TRUE(rank.until([&] { return rank.streams.contains(0); }));
    }
    rank.barrier();
  });
}

// Both sides begin at the same moment, many times over: one stream stands on both, and it is the
// same one.
TEST(SocketConnector, CrossingConnectionsSettleToOne) {
  for (int round = 0; round < 30; ++round) {
    Blackboard board(2);
    run_threads(2, [&](int me) {
      TestRank rank(options_of(me, 2, false), board);
      ASSERT_TRUE(rank.join().ok());
      rank.barrier();
      rank.connector().connect(1 - me, soon());
      EXPECT_TRUE(rank.talk(1 - me, 5000));
      rank.barrier();
      for (int i = 0; i < 20; ++i)
        rank.connector().poll(steady_clock().now() + std::chrono::milliseconds(i));
      EXPECT_EQ(rank.streams_reported, 1);
      EXPECT_TRUE(rank.failures.empty());
      rank.barrier();
    });
  }
}

// spec: A10.lengths interfaces: lists of different lengths are a clear error at init
TEST(SocketConnector, InterfaceListsOfDifferentLengthsAreRefusedByName) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    auto options = options_of(me, 2);
    options.interfaces =
        me == 0 ? std::vector<std::string>{"lo"} : std::vector<std::string>{"lo", "lo"};
    TestRank rank(options, board);
    const Status joined = rank.join();
    EXPECT_EQ(joined.code(), Code::invalid_argument);
    EXPECT_EQ(joined.ranks(), std::vector<int>({1}));
    EXPECT_NE(joined.message().find("rank 1"), std::string::npos) << joined.message();
    EXPECT_NE(joined.message().find("MUSTER_SOCKET_IFNAME"), std::string::npos) << joined.message();
  });
}

/// A socket of the stream. The descriptor of a bundle is an epoll set: the first that it holds.
int socket_of(const ByteStream& stream) {
  std::ifstream set("/proc/self/fdinfo/" + std::to_string(stream.descriptor()));
  int held = -1;
  for (std::string word; set >> word;) {
    if (word == "tfd:" && set >> held && SocketAddress::peer_of(held).ok()) return held;
  }
  return stream.descriptor();
}

/// Which of the two interfaces, `lo` both, the link from the rank to `peer` uses.
std::size_t interface_towards(TestRank& rank, int peer) {
  if (!rank.linked(peer)) return 99;
  const auto addresses =
      decode_peer_address(rank.contacts[static_cast<std::size_t>(peer)], peer)->addresses;
  const std::string there = SocketAddress::peer_of(socket_of(*rank.streams[peer]))->text();
  for (std::size_t i = 0; i < addresses.size(); ++i)
    if (addresses[i].text() == there) return i;
  return 99;
}

// spec: A10.round_robin interfaces: several are listened on and used in turn by the pairs of ranks:
// those of one rank, and those of the first ranks, the second ones and so on of two hosts
TEST(SocketConnector, SeveralInterfacesAreUsedInTurn) {
  constexpr int kRanks = 6;
  Blackboard board(kRanks);
  std::array<std::size_t, 3> lanes{};  // of hosts of three ranks
  std::set<std::size_t> of_rank_0;
  run_threads(kRanks, [&](int me) {
    auto options = options_of(me, kRanks, false);
    options.interfaces = {"lo", "lo"};
    TestRank rank(options, board);
    ASSERT_TRUE(rank.join().ok());
    if (me < 3) lanes[static_cast<std::size_t>(me)] = interface_towards(rank, me + 3);
    if (me == 0)
      for (int peer = 1; peer < kRanks; ++peer) of_rank_0.insert(interface_towards(rank, peer));
    const auto heard = [&](int from) { return from < 0 || rank.streams.contains(from); };
    EXPECT_TRUE(me == 0 || rank.until([&] { return heard(0) && heard(me - 3); }));
    rank.barrier();
  });
  EXPECT_EQ(of_rank_0, (std::set<std::size_t>{0, 1}));
  EXPECT_EQ(lanes, (std::array<std::size_t, 3>{1, 0, 1}));
}

TEST(SocketConnector, UnknownInterfaceIsNamed) {
  Blackboard board(1);
  auto options = options_of(0, 1);
  options.interfaces = {"nosuch0"};
  TestRank rank(options, board);
  EXPECT_NE(rank.join().message().find("nosuch0"), std::string::npos);
}

TEST(SocketConnector, ListensOnLoopbackWhereNothingElseWasAskedFor) {
  Blackboard board(1);
  TestRank rank(options_of(0, 1), board);
  ASSERT_TRUE(rank.join().ok());
  const PeerAddress contact = *decode_peer_address(rank.contacts[0], 0);
  ASSERT_EQ(contact.addresses.size(), 1u);
  EXPECT_TRUE(contact.addresses[0].is_loopback());
}

// A peer that is killed cannot say so; a child that it forked keeps what it can open.
TEST_P(SocketConnectorKinds, KilledPeerIsReportedOnceAndByName) {
  Blackboard board(3);
  SharedCounter forked, finished;
  run_processes(3,
                [&](int me) {
                  TestRank rank(options_of(me, 3, GetParam()), board);
                  ASSERT_TRUE(rank.join().ok());
                  rank.barrier();
                  if (me == 1) {
                    if (::fork() == 0) {
                      // A data loader's worker that outlives its parent, until the others have seen
                      // its end.
                      forked.add(1);
                      finished.wait_for(2, muster::testing::kMustHappen);
                      ::_exit(0);
                    }
                    forked.wait_for(1, muster::testing::kMustHappen);
                    ::kill(::getpid(), SIGKILL);
                  }
                  EXPECT_TRUE(rank.until([&] { return rank.deaths.contains(1); }));
                  finished.add(1);
                  EXPECT_EQ(rank.deaths[1].code(), Code::peer_failed);
                  EXPECT_EQ(rank.deaths[1].ranks(), std::vector<int>({1}));
                  EXPECT_NE(rank.deaths[1].message().find("rank 1 (pid "), std::string::npos)
                      << rank.deaths[1].message();
                  for (int i = 0; i < 20; ++i)
                    rank.connector().poll(steady_clock().now() + std::chrono::milliseconds(i));
                  EXPECT_EQ(rank.death_reports[1], 1);
                },
                {1});
}

// Ranks that are threads have no process whose end would show.
TEST(SocketConnector, PeerThatLeavesSaysSoInTheRegion) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2), board);
    ASSERT_TRUE(rank.join().ok());
    if (me == 0) rank.connector().mailbox().aborted.store(1);
    if (me == 1) {
      EXPECT_TRUE(rank.until([&] { return rank.deaths.contains(0); }));
    }
    rank.barrier();
  });
}

TEST_P(SocketConnectorKinds, ForkedChildHoldsNothingAndDisturbsNobody) {
  Blackboard board(2);
  run_processes(2, [&](int me) {
    TestRank rank(options_of(me, 2, GetParam()), board);
    ASSERT_TRUE(rank.join().ok());
    rank.connector().connect(1 - me, soon());
    EXPECT_TRUE(rank.talk(1 - me, 1000));
    rank.barrier();
    if (me == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        int sockets = 0;
        for (int fd = 3; fd < 256; ++fd) {
          int type = 0;
          socklen_t length = sizeof type;
          sockets += ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0;
        }
        const std::array<ConstBytes, 1> out{as_bytes("from a child")};
        const bool refused = rank.streams[1]->write(out).status().code() == Code::aborted;
        const bool idle = !rank.connector().poll(steady_clock().now());
        rank.streams.clear();
        ::_exit(sockets == 0 && refused && idle ? 0 : 1);
      }
      int status = -1;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
    rank.barrier();
    EXPECT_TRUE(rank.talk(1 - me, 50'000));
    rank.barrier();
  });
}

}  // namespace
}  // namespace muster::transport
