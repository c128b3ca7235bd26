// SPDX-License-Identifier: BSD-3-Clause
// Unauthenticated peers at the listening port and the abstract Unix socket of a whole fabric. Ranks
// are threads whose fabrics all stand in one process, so that a test can see every descriptor; in
// the test where descriptors run out, they are processes.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/store/factory.h"
#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "core/transport/host/local_files.h"
#include "core/transport/peer_address.h"
#include "core/transport/testing/transfer_expectations.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/process_usage.h"
#include "testing/rank_processes.h"
#include "testing/raw_peer.h"
#include "testing/scratch_folder.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

using std::chrono::seconds;
using testing::RawPeer;

constexpr const char* kSecret = "a secret for tests only";
constexpr const char* kJob = "the job that others try to enter";
constexpr Duration kLong = muster::testing::kMustHappen;

Result<std::unique_ptr<Fabric>> join(int rank, int world_size, bool shared_memory,
                                     std::shared_ptr<store::Store> store,
                                     std::vector<PeerAddress>& book) {
  ConnectorOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.job = kJob;
  options.shared_memory = shared_memory;
  options.ring_bytes = 16 * 1024;
  options.segment_bytes = std::size_t{1} << 24;
  FabricOptions fabric_options;
  fabric_options.rank = rank;
  fabric_options.world_size = world_size;
  fabric_options.timeout = kLong;
  fabric_options.heartbeat_limit = Duration::zero();
  const Exchange over_store = exchange_over(std::move(store), "meeting", rank, world_size,
                                            deadline_after(steady_clock(), kLong));
  return Fabric::create(
      fabric_options, make_socket_connector(options, Secret::given(kSecret)),
      [&](const std::string& round, const std::string& mine) {
        auto all = over_store(round, mine);
        for (std::size_t peer = 0; round == "contacts" && all.ok() && peer < all->size(); ++peer) {
          book.push_back(*decode_peer_address((*all)[peer], static_cast<int>(peer)));
        }
        return all;
      });
}

/// The sockets that an unauthenticated peer can connect to.
enum class Door { port, port_beside_shared_memory, local_socket };

class FabricUnauthenticatedPeers : public ::testing::TestWithParam<Door> {
 protected:
  // Ranks next to each other in the ring link by themselves; 0 and 2 do not.
  static constexpr int kRanks = 4;

  void SetUp() override {
    const auto store = store::make_hash_store(kLong);
    std::vector<std::vector<PeerAddress>> books(kRanks);
    fabrics.resize(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto at = static_cast<std::size_t>(rank);
        auto fabric = join(rank, kRanks, GetParam() != Door::port, store, books[at]);
        ASSERT_TRUE(fabric.ok()) << fabric.status().message();
        fabrics[at] = std::move(*fabric);
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_FALSE(HasFailure());
    contact = books[0][0];
    door = GetParam() == Door::local_socket ? testing::abstract_address(contact.local_name)
                                            : contact.addresses[0];
  }

  Handshake::Hello hello() const {
    Handshake::Hello hello;
    hello.role = GetParam() == Door::local_socket ? Handshake::Role::region : Handshake::Role::link;
    hello.rank = 1;
    hello.world_size = kRanks;
    hello.job = kJob;
    return hello;
  }

  /// Ranks 0 and `peer` talk, over a link that is made by the first such call.
  void talk(int peer) {
    const std::uint64_t tag = ++tags_;
    Fabric& here = *fabrics[0];
    Fabric& there = *fabrics[static_cast<std::size_t>(peer)];
    for (auto [from, to] : {std::pair(&here, &there), std::pair(&there, &here)}) {
      std::string out = "message " + std::to_string(tag), in(out.size(), 'x');
      const TransferRef receive =
          to->bootstrap().receive(from->rank(), tag, std::as_writable_bytes(std::span(in)), {});
      const TransferRef send = from->bootstrap().send(to->rank(), tag, as_bytes(out), {});
      const Status received = finish(*to, receive);
      ASSERT_TRUE(received.ok()) << received.message();
      const Status sent = finish(*from, send);
      ASSERT_TRUE(sent.ok()) << sent.message();
      ASSERT_EQ(in, out);
    }
  }

  /// A peer that knows the secret gets through that door now.
  void expect_served() {
    if (GetParam() == Door::local_socket) {
      const auto region =
          fetch_locally(contact.local_name, Want::region, hello(), Secret::given(kSecret), soon());
      // Once all have met there is no region to be had any more: only a peer that has proved the
      // secret is told so.
      EXPECT_EQ(region.status().code(), Code::unsupported) << region.status().message();
      return;
    }
    RawPeer peer(door);
    // A rank that is linked already, or lives another life, is known and not wanted: the answer of
    // a listener that works.
    EXPECT_FALSE(peer.authenticate(Secret::given(kSecret), hello()));
  }

  bool eventually(const std::function<bool()>& done) {
    for (const TimePoint end = soon(); !done();) {
      if (steady_clock().now() > end) return false;
      expect_served();
      talk(2);
    }
    return true;
  }

  std::vector<std::unique_ptr<Fabric>> fabrics;
  PeerAddress contact;
  SocketAddress door;

 private:
  std::uint64_t tags_ = 0;
};
std::string name_of(const ::testing::TestParamInfo<Door>& door) {
  const char* const names[] = {"port", "port_beside_shared_memory", "local_socket"};
  return names[static_cast<int>(door.param)];
}
INSTANTIATE_TEST_SUITE_P(Doors, FabricUnauthenticatedPeers,
                         ::testing::Values(Door::port, Door::port_beside_shared_memory,
                                           Door::local_socket),
                         name_of);

// spec: A1 thousands of malformed connections to a rank's port or local socket leave nothing
// behind, and the job goes on
TEST_P(FabricUnauthenticatedPeers, MalformedConnectionsLeaveNothingBehind) {
  std::mt19937_64 random(testing::test_seed());
  for (const int peer : {1, 2, 3}) talk(peer);
  expect_served();
  const auto memory = testing::memory_in_use();
  const int descriptors = testing::open_descriptors();
  const int rounds = testing::test_rounds(500, 10'000);
  for (int i = 0; i < rounds; ++i) {
    testing::pester(door, random, hello());
    if (i % 50 == 0) talk(2);
    ASSERT_FALSE(HasFailure()) << "after " << i << " connections; replay with MUSTER_TEST_SEED="
                               << testing::test_seed();
  }
  // Links between other ranks may have been made meanwhile, two descriptors each; a leak for each
  // connection would be hundreds.
  EXPECT_TRUE(eventually([&] { return testing::open_descriptors() <= descriptors + 2 * kRanks; }))
      << descriptors << " descriptors became " << testing::open_descriptors();
  if (testing::kMemoryTells) {
    EXPECT_LE(testing::memory_in_use().own, memory.own + (std::size_t{8} << 20));
  }
}

// spec: A1 a wrong secret is refused always
TEST_P(FabricUnauthenticatedPeers, WrongSecretsAreRefusedAlways) {
  for (int i = 0; i < testing::test_rounds(100, 10'000); ++i) {
    RawPeer peer(door);
    ASSERT_FALSE(peer.authenticate(Secret::given("guess number " + std::to_string(i)), hello()));
    ASSERT_EQ(peer.read_to_end(), "") << "refused without a further word";
  }
  expect_served();
  talk(2);
}

// spec: A1 a thousand connections that never finish the greeting keep no rank out, and are closed
// after five seconds or before
TEST_P(FabricUnauthenticatedPeers, AThousandSilentConnections) {
  std::mt19937_64 random(testing::test_seed());
  const testing::DescriptorLimit enough(4096);
  const std::string greeting =
      Handshake(Handshake::Side::connector, hello(), Secret::given(kSecret)).take_output();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 1000; ++i) {
    peers.push_back(std::make_unique<RawPeer>(door));
    if (const std::size_t cut = i % 2 == 0 ? 1 : random() % greeting.size(); cut > 0)
      peers.back()->send(greeting.substr(0, cut));
    if (i % 250 == 249) expect_served();
  }
  talk(2);  // their first word to each other: its link is made now
  for (auto& each : peers) EXPECT_EQ(each->read_to_end(), "");
  expect_served();
  talk(2);
}

/// Rank 0 has few files and gives its port to the test. The others' first links to it are made
/// while unauthenticated peers hold all of them (counted by `occupied`), and after.
std::string scarce_rank(int rank, int world_size, const std::string& path,
                        testing::SharedCounter& port, testing::SharedCounter& occupied,
                        testing::SharedCounter& met) {
  const auto store = store::make_file_store(path, world_size, kLong);
  if (!store) return store.status().message();
  std::vector<PeerAddress> book;
  auto fabric = join(rank, world_size, false, *store, book);
  if (!fabric) return fabric.status().message();
  if (rank == 0) {
    const auto files = static_cast<rlim_t>(testing::open_descriptors() + 12);
    const rlimit few{files, files};
    ::setrlimit(RLIMIT_NOFILE, &few);
    port.add(book[0].addresses[0].port());
  }
  std::string text = "hello", in = "xxxxx";
  Channel& channel = (*fabric)->bootstrap();
  for (int peer = 1; peer < world_size; ++peer) {
    if (rank != 0 && rank != peer) continue;
    if (!occupied.wait_for(peer, kLong)) return "rank 0's descriptors were not used up";
    const TransferRef transfer =
        rank == 0 ? channel.receive(peer, 1, std::as_writable_bytes(std::span(in)), {})
                  : channel.send(0, 1, as_bytes(text), {});
    if (const Status done = finish(**fabric, transfer); !done)
      return "rank " + std::to_string(peer) + ": " + done.message();
    if (rank == 0) met.add(1);
  }
  return met.wait_for(world_size - 1, kLong) && occupied.wait_for(world_size, kLong)
             ? "done"
             : "the others did not come";
}

// spec: A1 no file descriptors left: a rank waits and recovers, and is reached all the same
TEST(FabricWithFewFiles, ARankWithoutDescriptorsIsReached) {
  constexpr int kRanks = 6;
  const testing::ScratchFolder scratch;
  testing::SharedCounter port, occupied, met;
  testing::RankProcesses ranks(kRanks, [&](int rank) {
    return scarce_rank(rank, kRanks, scratch.file("store"), port, occupied, met);
  });
  ASSERT_TRUE(port.wait_for(1, kLong));
  for (int peer = 1; peer < kRanks; ++peer) {
    std::vector<std::unique_ptr<RawPeer>> outsiders;
    for (int i = 0; i < 40; ++i)
      outsiders.push_back(std::make_unique<RawPeer>(static_cast<std::uint16_t>(port.value())));
    occupied.add(1);
    EXPECT_TRUE(met.wait_for(peer, kLong)) << "rank " << peer << " did not reach rank 0";
  }
  occupied.add(1);
  for (const auto& end : ranks.join(kLong)) EXPECT_EQ(end.report, "done");
}

}  // namespace
}  // namespace muster::transport
