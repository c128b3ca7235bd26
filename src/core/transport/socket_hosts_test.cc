// SPDX-License-Identifier: BSD-3-Clause
// Connections that are let in, and ranks on several hosts.
#include "core/transport/testing/connector_job.h"
#include "testing/raw_peer.h"

namespace muster::transport {
namespace {

using namespace connector_test;

// ---- unauthenticated peers ----

TEST(SocketConnectorOutsiders, NobodyElseIsDisturbed) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const SocketAddress port = decode_peer_address(rank.contacts[0], 0)->addresses[0];
    std::vector<Descriptor> silent;
    if (me == 1) {
      for (int i = 0; i < 100; ++i) {
        Descriptor noisy = testing::dial(port);
        const std::string noise(static_cast<std::size_t>(1 + i * 13), static_cast<char>(i));
        EXPECT_GT(::send(noisy.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
      }
      for (int i = 0; i < 50; ++i) {
        silent.push_back(testing::dial(port));
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

// Everything right but the secret; then everything right but the life of the rank; then a rank that
// is linked already.
TEST(SocketConnectorOutsiders, WrongSecretOldLifeAndSecondStreamAreTurnedAway) {
  Blackboard board(2);
  run_threads(2, [&](int me) {
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const PeerAddress target = *decode_peer_address(rank.contacts[0], 0);
    const PeerAddress self = *decode_peer_address(rank.contacts[1], 1);
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
        PendingConnection connection(GuardedDescriptor(testing::dial(target.addresses[0])), hello,
                                     secret, {.limit = soon()});
        for (;;) {
          const auto progress = connection.advance([](const Handshake::Peer&) { return true; });
          if (progress != PendingConnection::HandshakeProgress::waiting)
            return connection.verdict();
          pollfd wait{connection.descriptor(), POLLIN, 0};
          ::poll(&wait, 1, 100);
        }
      };
      EXPECT_EQ(attempt(Secret::given("another secret, as long as needed"), self.nonce),
                Handshake::Verdict::bad_proof);
      EXPECT_EQ(attempt(Secret::given(kSecret), self.nonce + 1), Handshake::Verdict::unwelcome);
      EXPECT_EQ(attempt(Secret::given(kSecret), self.nonce), Handshake::Verdict::unwelcome);
      const std::array<ConstBytes, 1> out{as_bytes("done")};
      EXPECT_EQ(rank.streams[0]->write(out).value(), 4u);
    } else {
      std::array<std::byte, 4> some{};
      const std::array<MutableBytes, 1> in{some};
      EXPECT_TRUE(rank.until(
          [&] { return rank.streams.contains(1) && rank.streams[1]->read(in).value() == 4; }));
    }
    rank.barrier();
    EXPECT_EQ(rank.streams_reported, 1);
  });
}

// ---- hosts ----

/// A rank, a process, on each of two hosts.
void on_two_hosts(
    const std::function<void(NetworkNamespaces& net, Blackboard& board, int me)>& body) {
  auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  Blackboard board(2);
  run_processes(2, [&](int me) {
    ASSERT_TRUE((*net)->enter(me).ok());
    body(**net, board, me);
  });
}

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
    EXPECT_EQ(decode_peer_address(rank.contacts[3], 3)->addresses[0].host(), (*net)->address(1))
        << "the address that routes to the store";
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
  on_two_hosts([](NetworkNamespaces& net, Blackboard& board, int me) {
    auto options = options_of(me, 2);
    options.towards = net.address_v6(0);
    TestRank rank(options, board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(decode_peer_address(rank.contacts[1], 1)->addresses[0].family(), AF_INET6);
    rank.connector().connect(1 - me, soon());
    EXPECT_TRUE(rank.talk(1 - me, 50'000));
    rank.barrier();
  });
}

TEST(SocketConnectorHosts, AnotherHostWithoutASecretIsRefusedByName) {
  on_two_hosts([](NetworkNamespaces& net, Blackboard& board, int me) {
    ::unsetenv("MUSTER_SECRET");
    ::unsetenv("MUSTER_SECRET_FILE");
    ::unsetenv("MUSTER_INSECURE");
    auto options = options_of(me, 2);
    options.towards = net.address(0);
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
  on_two_hosts([](NetworkNamespaces& net, Blackboard& board, int me) {
    auto options = options_of(me, 2);
    options.towards = net.address(0);
    TestRank rank(options, board);
    ASSERT_TRUE(rank.join().ok());
    if (me == 0) {
      ASSERT_TRUE(net.set_plugged(1, false).ok());
    }
    rank.barrier();
    if (me == 0) {
      rank.connector().connect(1, steady_clock().now() + std::chrono::milliseconds(300));
      EXPECT_TRUE(rank.until([&] { return rank.failures.contains(1); }));
      EXPECT_EQ(rank.failures[1].code(), Code::timed_out);
      EXPECT_EQ(rank.failures[1].ranks(), std::vector<int>({1}));
      EXPECT_NE(rank.failures[1].message().find(net.address(1)), std::string::npos)
          << rank.failures[1].message();
    }
    rank.barrier();
  });
}

// spec: A13 interfaces are found where none is named and the store has no address, as a file has
// none: the default route's; B7 file:// over several hosts
TEST(SocketConnectorHosts, WithoutAStoreAddressTheDefaultRouteIsTaken) {
  on_two_hosts([](NetworkNamespaces& net, Blackboard& board, int me) {
    ASSERT_EQ(std::system(("ip route add default via " + net.address(1 - me)).c_str()), 0);
    auto options = options_of(me, 2);
    options.any_host = true;
    TestRank rank(options, board);
    const Status joined = rank.join();
    ASSERT_TRUE(joined.ok()) << joined.message();
    EXPECT_EQ(decode_peer_address(rank.contacts[1], 1)->addresses[0].host(), net.address(1));
    rank.connector().connect(1 - me, soon());
    EXPECT_TRUE(rank.talk(1 - me, 50'000));
    rank.barrier();
  });
}

TEST(SocketConnectorHosts, LoopbackAddressThatOthersCannotReachIsNamed) {
  on_two_hosts([](NetworkNamespaces&, Blackboard& board, int me) {
    TestRank rank(options_of(me, 2), board);
    const Status joined = rank.join();
    EXPECT_EQ(joined.code(), Code::network);
    EXPECT_NE(joined.message().find("MUSTER_SOCKET_IFNAME"), std::string::npos) << joined.message();
  });
}

}  // namespace
}  // namespace muster::transport
