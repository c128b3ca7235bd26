#include "muster/transport/socket_connector.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "muster/testing/network_namespaces.h"
#include "muster/testing/rank_processes.h"
#include "muster/transport/arena.h"
#include "muster/transport/factory.h"

namespace muster::transport {
namespace {

using testing::NetworkNamespaces;
using testing::RankProcesses;
using testing::SharedCounter;

constexpr const char* kSecret = "a secret for tests only";
TimePoint soon() { return steady_clock().now() + std::chrono::seconds(20); }

/// Where ranks, threads or forked processes, leave texts for each other.
class Blackboard {
 public:
  explicit Blackboard(int world_size)
      : world_size_(world_size),
        slots_(static_cast<char*>(::mmap(nullptr, kRounds * static_cast<std::size_t>(world_size) * kSlot, PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Blackboard() { ::munmap(slots_, kRounds * static_cast<std::size_t>(world_size_) * kSlot); }

  /// Everybody's texts of this round (each rank counts its own rounds).
  std::vector<std::string> exchange(int rank, int round, const std::string& mine) {
    char* const slot = slot_of(round, rank);
    const auto length = static_cast<std::uint32_t>(mine.size());
    std::memcpy(slot, &length, sizeof length);
    std::memcpy(slot + sizeof length, mine.data(), mine.size());
    arrived_.add(1);
    EXPECT_TRUE(arrived_.wait_for((round + 1) * world_size_, std::chrono::seconds(60))) << "rank " << rank << " round " << round;
    std::vector<std::string> all;
    for (int each = 0; each < world_size_; ++each) {
      std::uint32_t size = 0;
      std::memcpy(&size, slot_of(round, each), sizeof size);
      all.emplace_back(slot_of(round, each) + sizeof size, size);
    }
    return all;
  }

 private:
  static constexpr std::size_t kRounds = 16;
  static constexpr std::size_t kSlot = 2048;
  char* slot_of(int round, int rank) { return slots_ + (static_cast<std::size_t>(round * world_size_ + rank)) * kSlot; }

  int world_size_;
  char* slots_;
  SharedCounter arrived_;
};

/// What a connector said, and a rank's use of it in place of a fabric.
class TestRank final : public ConnectorEvents {
 public:
  TestRank(ConnectorOptions options, Blackboard& board, Secret secret = Secret::given(kSecret))
      : rank_(options.rank), board_(board), connector_(make_socket_connector(std::move(options), std::move(secret))) {}

  Status join() {
    auto contact = connector_->contact(TimePoint::max());
    if (!contact) return contact.status();
    contacts = exchange(*contact);
    auto verdict = connector_->meet(contacts, soon());
    if (!verdict) return verdict.status();
    return connector_->settle(exchange(*verdict), *this);
  }
  std::vector<std::string> exchange(const std::string& mine) { return board_.exchange(rank_, round_++, mine); }
  void barrier() { exchange(""); }

  void on_stream(int peer, std::unique_ptr<ByteStream> stream) override {
    ++streams_reported;
    streams[peer] = std::move(stream);
  }
  void on_connect_failed(int peer, Status cause) override { failures[peer] = std::move(cause); }
  void on_death(int peer, Status evidence) override {
    ++death_reports[peer];
    deaths[peer] = std::move(evidence);
  }

  /// Polls until `done`, asleep in between on the descriptor as a watcher is; false after a long time.
  bool until(const std::function<bool()>& done, Duration limit = std::chrono::seconds(20)) {
    const TimePoint end = steady_clock().now() + limit;
    while (!done()) {
      const TimePoint now = steady_clock().now();
      if (now >= end) return false;
      if (connector_->poll(now)) continue;
      pollfd wait{connector_->descriptor(), POLLIN, 0};
      ::poll(&wait, 1, 1);
    }
    return true;
  }
  bool linked(int peer) {
    connector_->connect(peer, soon());
    return until([&] { return streams.contains(peer) || failures.contains(peer); }) && streams.contains(peer);
  }
  /// Sends and receives `bytes` patterned bytes at once.
  bool talk(int peer, std::size_t bytes) {
    if (!until([&] { return streams.contains(peer); })) return false;
    std::vector<std::byte> out(bytes), in(bytes);
    for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(rank_));
    std::size_t sent = 0, got = 0;
    const bool moved = until([&] {
      const std::array<ConstBytes, 2> pieces{ConstBytes(out).subspan(sent, (bytes - sent) / 3),
                                             ConstBytes(out).subspan(sent + (bytes - sent) / 3)};
      const auto now_sent = streams[peer]->write(pieces);
      const std::array<MutableBytes, 1> room{MutableBytes(in).subspan(got)};
      const auto now_got = streams[peer]->read(room);
      EXPECT_TRUE(now_sent.ok()) << now_sent.status().message();
      EXPECT_TRUE(now_got.ok()) << now_got.status().message();
      if (!now_sent.ok() || !now_got.ok()) return true;
      sent += *now_sent;
      got += *now_got;
      return sent == bytes && got == bytes;
    });
    for (std::size_t i = 0; i < bytes; ++i) {
      if (in[i] != static_cast<std::byte>(i * 7 + static_cast<std::size_t>(peer))) return false;
    }
    return moved;
  }

  Connector& connector() { return *connector_; }

  std::vector<std::string> contacts;
  int streams_reported = 0;
  std::map<int, int> death_reports;
  std::map<int, std::unique_ptr<ByteStream>> streams;
  std::map<int, Status> failures;
  std::map<int, Status> deaths;

 private:
  int rank_;
  int round_ = 0;
  Blackboard& board_;
  std::unique_ptr<Connector> connector_;
};

ConnectorOptions options_of(int rank, int world_size, bool shared_memory = true) {
  ConnectorOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.job = "test";
  options.shared_memory = shared_memory;
  options.ring_bytes = 8192;
  options.segment_bytes = std::size_t{1} << 24;
  return options;
}

void run_threads(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

/// Runs `body` in a process for each rank; what fails there is the report, and so fails here.
void run_processes(int world_size, const std::function<void(int)>& body, const std::set<int>& killed = {}) {
  RankProcesses processes(world_size, [&](int rank) {
    // What a child throws must not reach the test's frame, which would go on in it.
    try {
      body(rank);
    } catch (const std::exception& error) {
      return std::string("threw ") + error.what();
    }
    return std::string(::testing::Test::HasFailure() ? "failed" : "passed");
  });
  const auto ends = processes.join(std::chrono::seconds(100));
  for (int rank = 0; rank < world_size; ++rank) {
    if (!killed.contains(rank)) {
      EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "passed") << "rank " << rank;
    }
  }
}

void all_talk(TestRank& rank, int me, int world_size, std::size_t bytes) {
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != me) rank.connector().connect(peer, soon());
  }
  for (int step = 1; step < world_size; ++step) {
    // Pairs meet in an order that suits all: peer = step xor me, for powers of two.
    const int peer = me ^ step;
    EXPECT_TRUE(rank.talk(peer, bytes)) << "rank " << me << " with " << peer;
    EXPECT_EQ(rank.streams[peer]->kind(), std::string(rank.connector().region() != nullptr ? "shm" : "tcp"));
  }
  rank.barrier();
  EXPECT_EQ(rank.streams_reported, world_size - 1);
  EXPECT_TRUE(rank.failures.empty());
}

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
    HostRegion& region = *rank.connector().region();
    EXPECT_EQ(region.local_rank(), me);
    seen[static_cast<std::size_t>(me)] = region.at(0);
    // Their arena is one and the same as well.
    std::byte* const memory = (*Arena::of_process())->allocate(64).value();
    EXPECT_EQ(region.arena_at((me + 1) % 3, *(*Arena::of_process())->offset_of(memory, 64), 64), memory);
    (*Arena::of_process())->free(memory);
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
    HostRegion& region = *rank.connector().region();
    // Each answers while the other asks: a thread polls, as a fabric's watcher does.
    std::atomic<bool> stop{false};
    std::thread watcher([&] { rank.until([&] { return stop.load(); }); });
    EXPECT_EQ(region.arena_at(1 - me, 0, 1), nullptr) << "no arena is there yet";
    rank.barrier();
    // Made after the ranks have met; having asked in vain before does no harm.
    Arena& arena = **Arena::of_process();
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
      EXPECT_EQ(std::vector<int>(ranks.begin(), ranks.end()), expected[static_cast<std::size_t>(me)]);
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

// Both sides begin at the same moment, many times over: one stream stands on both, and it is the same one.
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
      for (int i = 0; i < 20; ++i) rank.connector().poll(steady_clock().now() + std::chrono::milliseconds(i));
      EXPECT_EQ(rank.streams_reported, 1);
      EXPECT_TRUE(rank.failures.empty());
      rank.barrier();
    });
  }
}

// spec: A10 interfaces: lists of different lengths are a clear error at init
TEST(SocketConnector, InterfaceListsOfDifferentLengthsAreRefusedByName) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    auto options = options_of(me, 2);
    options.interfaces = me == 0 ? std::vector<std::string>{"lo"} : std::vector<std::string>{"lo", "lo"};
    TestRank rank(options, board);
    const Status joined = rank.join();
    EXPECT_EQ(joined.code(), Code::invalid_argument);
    EXPECT_EQ(joined.ranks(), std::vector<int>({1}));
    EXPECT_NE(joined.message().find("rank 1"), std::string::npos) << joined.message();
    EXPECT_NE(joined.message().find("MUSTER_SOCKET_IFNAME"), std::string::npos) << joined.message();
  });
}

// spec: A10 interfaces: several are listened on and used in turn by the pairs of ranks
TEST(SocketConnector, SeveralInterfacesAreUsedInTurn) {
  Blackboard board(3);
  run_threads(3, [&](int me) {
    auto options = options_of(me, 3, false);
    options.interfaces = {"lo", "lo"};
    TestRank rank(options, board);
    ASSERT_TRUE(rank.join().ok());
    if (me == 0) {
      std::set<std::size_t> used;
      for (const int peer : {1, 2}) {
        ASSERT_TRUE(rank.linked(peer));
        const auto addresses = decode_contact(rank.contacts[static_cast<std::size_t>(peer)], peer)->addresses;
        ASSERT_EQ(addresses.size(), 2u);
        const std::string there = SocketAddress::peer_of(rank.streams[peer]->descriptor())->text();
        used.insert(there == addresses[0].text() ? 0u : 1u);
        EXPECT_TRUE(there == addresses[0].text() || there == addresses[1].text()) << there;
      }
      EXPECT_EQ(used.size(), 2u);
    } else {
      EXPECT_TRUE(rank.until([&] { return rank.streams.contains(0); }));
    }
    rank.barrier();
  });
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
  const Contact contact = *decode_contact(rank.contacts[0], 0);
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
                      // A data loader's worker that outlives its parent, until the others have seen its end.
                      forked.add(1);
                      finished.wait_for(2, std::chrono::seconds(30));
                      ::_exit(0);
                    }
                    forked.wait_for(1, std::chrono::seconds(30));
                    ::kill(::getpid(), SIGKILL);
                  }
                  EXPECT_TRUE(rank.until([&] { return rank.deaths.contains(1); }));
                  finished.add(1);
                  EXPECT_EQ(rank.deaths[1].code(), Code::peer_failed);
                  EXPECT_EQ(rank.deaths[1].ranks(), std::vector<int>({1}));
                  EXPECT_NE(rank.deaths[1].message().find("rank 1 (pid "), std::string::npos) << rank.deaths[1].message();
                  for (int i = 0; i < 20; ++i) rank.connector().poll(steady_clock().now() + std::chrono::milliseconds(i));
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

// ---- strangers ----

/// A plain client, as a stranger is.
Descriptor dial(const SocketAddress& address) {
  Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), address.raw(), address.length()), 0);
  return socket;
}

TEST(SocketConnectorStrangers, NobodyElseIsDisturbed) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const SocketAddress port = decode_contact(rank.contacts[0], 0)->addresses[0];
    std::vector<Descriptor> silent;
    if (me == 1) {
      for (int i = 0; i < 100; ++i) {
        Descriptor noisy = dial(port);
        const std::string noise(static_cast<std::size_t>(1 + i * 13), static_cast<char>(i));
        EXPECT_GT(::send(noisy.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
      }
      for (int i = 0; i < 50; ++i) {
        silent.push_back(dial(port));
        EXPECT_EQ(::send(silent.back().get(), "m", 1, MSG_NOSIGNAL), 1);
      }
    }
    rank.barrier();
    if (me == 1) rank.connector().connect(0, soon());
    EXPECT_TRUE(rank.talk(1 - me, 10'000));
    rank.barrier();
    EXPECT_EQ(rank.streams_reported, 1);
  });
}

// Everything right but the secret; then everything right but the life of the rank; then a rank that is linked already.
TEST(SocketConnectorStrangers, WrongSecretOldLifeAndSecondStreamAreTurnedAway) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const Contact target = *decode_contact(rank.contacts[0], 0);
    const Contact self = *decode_contact(rank.contacts[1], 1);
    std::atomic<bool> stop{false};
    if (me == 1) {
      EXPECT_TRUE(rank.linked(0));
      const auto attempt = [&](Secret secret, std::uint64_t nonce) {
        Blackboard unused(1);
        Handshake::Hello hello;
        hello.role = Handshake::Role::link;
        hello.rank = 1;
        hello.world_size = 2;
        hello.job = "test";
        hello.note = nonce;
        PendingConnection connection(GuardedDescriptor(dial(target.addresses[0])), Handshake::Side::connector, hello, secret, false,
                                     TimePoint{}, soon());
        for (;;) {
          const auto progress = connection.advance([](const Handshake::Peer&) { return true; });
          if (progress != PendingConnection::Progress::waiting) return connection.handshake().verdict();
          pollfd wait{connection.descriptor(), POLLIN, 0};
          ::poll(&wait, 1, 100);
        }
      };
      EXPECT_EQ(attempt(Secret::given("another secret, as long as needed"), self.nonce), Handshake::Verdict::bad_proof);
      EXPECT_EQ(attempt(Secret::given(kSecret), self.nonce + 1), Handshake::Verdict::unwelcome);
      EXPECT_EQ(attempt(Secret::given(kSecret), self.nonce), Handshake::Verdict::unwelcome);
      const std::array<ConstBytes, 1> out{as_bytes("done")};
      EXPECT_EQ(rank.streams[0]->write(out).value(), 4u);
    } else {
      std::array<std::byte, 4> some{};
      const std::array<MutableBytes, 1> in{some};
      EXPECT_TRUE(rank.until([&] { return rank.streams.contains(1) && rank.streams[1]->read(in).value() == 4; }));
    }
    rank.barrier();
    EXPECT_EQ(rank.streams_reported, 1);
  });
}

// ---- hosts ----

// spec: A13 interfaces are found where none is named: the one that routes to the master
TEST(SocketConnectorHosts, NetworkNamespacesAreHosts) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(4);
  run_processes(4, [&](int me) {
    const Status entered = (*net)->enter(me / 2);
    ASSERT_TRUE(entered.ok()) << entered.message();
    auto options = options_of(me, 4);
    options.towards = (*net)->address(0);
    TestRank rank(options, board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(rank.connector().hosts(), std::vector<int>({0, 0, 1, 1}));
    EXPECT_EQ(decode_contact(rank.contacts[3], 3)->addresses[0].host(), (*net)->address(1)) << "the address that routes to the store";
    ASSERT_NE(rank.connector().region(), nullptr);
    EXPECT_EQ(rank.connector().region()->ranks()[0], me / 2 * 2);
    for (int step = 1; step < 4; ++step) {
      rank.connector().connect(me ^ step, soon());
      EXPECT_TRUE(rank.talk(me ^ step, 50'000));
      EXPECT_EQ(rank.streams[me ^ step]->kind(), std::string(step == 1 ? "shm" : "tcp"));
    }
    rank.barrier();
  });
}

TEST(SocketConnectorHosts, TalkOverIPv6) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ASSERT_TRUE((*net)->enter(me).ok());
    auto options = options_of(me, 2);
    options.towards = (*net)->address_v6(0);
    TestRank rank(options, board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(decode_contact(rank.contacts[1], 1)->addresses[0].family(), AF_INET6);
    rank.connector().connect(1 - me, soon());
    EXPECT_TRUE(rank.talk(1 - me, 50'000));
    rank.barrier();
  });
}

TEST(SocketConnectorHosts, AnotherHostWithoutASecretIsRefusedByName) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ::unsetenv("MUSTER_SECRET");
    ::unsetenv("MUSTER_SECRET_FILE");
    ::unsetenv("MUSTER_INSECURE");
    ASSERT_TRUE((*net)->enter(me).ok());
    auto options = options_of(me, 2);
    options.towards = (*net)->address(0);
    auto secret = Secret::from_environment();
    ASSERT_TRUE(secret.ok()) << secret.status().message();
    TestRank rank(options, board, *secret);
    const Status joined = rank.join();
    EXPECT_EQ(joined.code(), Code::refused);
    EXPECT_NE(joined.message().find("MUSTER_SECRET"), std::string::npos) << joined.message();
    EXPECT_EQ(joined.ranks(), std::vector<int>({1 - me}));
  });
}

TEST(SocketConnectorHosts, PeerThatIsNotThereIsNamedAtTheDeadline) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ASSERT_TRUE((*net)->enter(me).ok());
    auto options = options_of(me, 2);
    options.towards = (*net)->address(0);
    TestRank rank(options, board);
    ASSERT_TRUE(rank.join().ok());
    if (me == 0) {
      ASSERT_TRUE((*net)->set_plugged(1, false).ok());
    }
    rank.barrier();
    if (me == 0) {
      rank.connector().connect(1, steady_clock().now() + std::chrono::milliseconds(300));
      EXPECT_TRUE(rank.until([&] { return rank.failures.contains(1); }));
      EXPECT_EQ(rank.failures[1].code(), Code::timed_out);
      EXPECT_EQ(rank.failures[1].ranks(), std::vector<int>({1}));
      EXPECT_NE(rank.failures[1].message().find((*net)->address(1)), std::string::npos) << rank.failures[1].message();
    }
    rank.barrier();
  });
}

// spec: A13 interfaces are found where none is named and the store has no address, as a file has none: the default route's
// spec: B7 file:// over several hosts
TEST(SocketConnectorHosts, WithoutAStoreAddressTheDefaultRouteIsTaken) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ASSERT_TRUE((*net)->enter(me).ok());
    ASSERT_EQ(std::system(("ip route add default via " + (*net)->address(1 - me)).c_str()), 0);
    TestRank rank(options_of(me, 2), board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(decode_contact(rank.contacts[1], 1)->addresses[0].host(), (*net)->address(1));
    rank.connector().connect(1 - me, soon());
    EXPECT_TRUE(rank.talk(1 - me, 50'000));
    rank.barrier();
  });
}

TEST(SocketConnectorHosts, LoopbackAddressThatOthersCannotReachIsNamed) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ASSERT_TRUE((*net)->enter(me).ok());
    TestRank rank(options_of(me, 2), board);
    const Status joined = rank.join();
    EXPECT_EQ(joined.code(), Code::network);
    EXPECT_NE(joined.message().find("MUSTER_SOCKET_IFNAME"), std::string::npos) << joined.message();
  });
}

}  // namespace
}  // namespace muster::transport
