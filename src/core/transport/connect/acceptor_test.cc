// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/net/socket_address.h"
#include "core/transport/connect/acceptor.h"
#include "core/transport/testing/transfer_expectations.h"
#include "testing/raw_peer.h"

namespace muster::transport {
namespace {

constexpr const char* kSecret = "a secret for tests only";

bool is_closed_by_peer(const Descriptor& socket) {
  std::array<char, 512> input;
  const ssize_t got = ::recv(socket.get(), input.data(), input.size(), MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

class Hall {
 public:
  explicit Hall(std::size_t most = 256, Duration limit = std::chrono::seconds(5),
                std::function<bool(int)> admit = {}) {
    AcceptorOptions options;
    options.admit = std::move(admit);
    options.hello = hello();
    options.most_pending = most;
    options.handshake_limit = limit;
    options.arrived = [this](AuthenticatedSocket socket) { arrived.push_back(std::move(socket)); };
    acceptor = std::make_unique<Acceptor>(std::move(options), Secret::given(kSecret));
    Descriptor listener = std::move(*listen_on(*SocketAddress::numeric("127.0.0.1", 0), 1024));
    address = *SocketAddress::local_of(listener.get());
    EXPECT_TRUE(acceptor->serve(std::move(listener)).ok());
  }
  static Handshake::Hello hello() {
    Handshake::Hello hello;
    hello.role = Handshake::Role::link;
    return hello;
  }
  bool until(const std::function<bool()>& done) {
    for (const TimePoint end = soon(); !done();) {
      if (steady_clock().now() > end) return false;
      acceptor->poll(now());
    }
    return true;
  }
  /// The acceptor's clock: the real one, or a moment that the test holds on to.
  TimePoint now() const { return held.value_or(steady_clock().now()); }
  /// A peer with the secret gets through.
  bool serves() {
    const std::size_t before = arrived.size();
    PendingConnection connection(GuardedDescriptor(testing::dial(address)), hello(),
                                 Secret::given(kSecret), {.limit = soon()});
    PendingConnection::HandshakeProgress progress{};
    return until([&] {
      progress = connection.advance([](const Handshake::Peer&) { return true; });
      return progress != PendingConnection::HandshakeProgress::waiting && arrived.size() > before;
    });
  }

  std::unique_ptr<Acceptor> acceptor;
  std::optional<TimePoint> held;
  SocketAddress address;
  std::vector<AuthenticatedSocket> arrived;
};

TEST(Acceptor, TheOldestPendingOneMakesRoomForANewOne) {
  Hall hall(10);
  std::vector<Descriptor> silent;
  for (int i = 0; i < 25; ++i) {
    silent.push_back(testing::dial(hall.address));
    hall.until([&] {
      return hall.acceptor->pending() >= std::min<std::size_t>(static_cast<std::size_t>(i) + 1, 10);
    });
  }
  EXPECT_TRUE(
      hall.until([&] { return is_closed_by_peer(silent[0]) && is_closed_by_peer(silent[14]); }));
  EXPECT_FALSE(is_closed_by_peer(silent[24]));
  EXPECT_LE(hall.acceptor->pending(), 10u);
  EXPECT_EQ(hall.acceptor->refusals(), 15u);
  EXPECT_TRUE(hall.serves());
}

// The strands of many peers' bundles come at once, and none of them is dropped for another.
TEST(Acceptor, ConnectionsThatPeersHaveAnnouncedTakeNoPlaceOfOthers) {
  Hall hall(10);
  std::vector<Descriptor> silent;
  const auto come = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) silent.push_back(testing::dial(hall.address));
  };
  hall.acceptor->expect(5);
  come(15);
  EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 15; }));
  EXPECT_EQ(hall.acceptor->refusals(), 0u);
  come(1);
  EXPECT_TRUE(hall.until([&] { return is_closed_by_peer(silent[0]); }));
  EXPECT_EQ(hall.acceptor->pending(), 15u);
}

// spec: W1 a listener counts those as well that it lets say nothing
TEST(Acceptor, CountsWhomItDoesNotAdmit) {
  Hall hall(256, std::chrono::seconds(5), [](int) { return false; });
  const Descriptor another = testing::dial(hall.address);
  EXPECT_TRUE(hall.until([&] { return is_closed_by_peer(another); }));
  EXPECT_EQ(hall.acceptor->refusals(), 1u);
}

TEST(Acceptor, WhoDoesNotFinishTheGreetingIsClosedAfterTheLimit) {
  Hall hall;
  const Descriptor slow = testing::dial(hall.address);
  EXPECT_EQ(::send(slow.get(), "m", 1, MSG_NOSIGNAL), 1);
  EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 1; }));
  const TimePoint timer = hall.acceptor->next_timer();
  EXPECT_LE(timer, steady_clock().now() + std::chrono::seconds(5));
  hall.acceptor->poll(timer - std::chrono::milliseconds(1));
  EXPECT_EQ(hall.acceptor->pending(), 1u);
  hall.acceptor->poll(timer);
  EXPECT_EQ(hall.acceptor->pending(), 0u);
  EXPECT_TRUE(hall.until([&] { return is_closed_by_peer(slow); }));
  EXPECT_TRUE(hall.serves());
}

// spec: W1 a rank's listener counts whom it refuses; ranks that prove the secret are not among them
TEST(Acceptor, CountsWhomItRefuses) {
  Hall hall;
  const auto tries = [&](const Secret& secret) {
    PendingConnection connection(GuardedDescriptor(testing::dial(hall.address)), Hall::hello(),
                                 secret, {.limit = soon()});
    PendingConnection::HandshakeProgress progress{};
    EXPECT_TRUE(hall.until([&] {
      progress = connection.advance([](const Handshake::Peer&) { return true; });
      return progress != PendingConnection::HandshakeProgress::waiting;
    }));
    return progress == PendingConnection::HandshakeProgress::done;
  };
  EXPECT_TRUE(tries(Secret::given(kSecret)));
  EXPECT_EQ(hall.acceptor->refusals(), 0u);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(tries(Secret::given("a guess at the secret")));
  EXPECT_EQ(hall.acceptor->refusals(), 3u);
  const Descriptor silent = testing::dial(hall.address);
  EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 1; }));
  hall.acceptor->poll(hall.acceptor->next_timer());
  EXPECT_EQ(hall.acceptor->refusals(), 4u);
  EXPECT_TRUE(hall.serves());
  EXPECT_EQ(hall.acceptor->refusals(), 4u);
}

TEST(Acceptor, MalformedConnectionsLeaveNothingBehind) {
  Hall hall;
  const Descriptor next_before(::dup(0));
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    const Descriptor peer = testing::dial(hall.address);
    std::string noise(1 + random() % 400, '\0');
    for (char& each : noise) each = static_cast<char>(random());
    if (i % 4 == 0)
      noise.replace(0, std::min<std::size_t>(8, noise.size()),
                    std::string("muster\r\n").substr(0, noise.size()));
    EXPECT_GT(::send(peer.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
    hall.acceptor->poll(steady_clock().now());
  }
  EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 0; }));
  EXPECT_TRUE(hall.arrived.empty());
  const Descriptor next_after(::dup(0));
  EXPECT_EQ(next_after.get(), next_before.get() + 1) << "descriptors were left behind";
  EXPECT_TRUE(hall.serves());
}

/// Sets another limit on open files while it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit now{limit, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Acceptor, AThousandSilentConnectionsDoNotKeepAPeerOut) {
  const DescriptorLimit enough(4096);
  Hall hall;
  std::vector<Descriptor> silent;
  for (int i = 0; i < 1000; ++i) {
    silent.push_back(testing::dial(hall.address));
    EXPECT_EQ(::send(silent.back().get(), "m", 1, MSG_NOSIGNAL), 1);
    if (i % 100 == 99) {
      EXPECT_TRUE(hall.serves());
    }
  }
  EXPECT_LE(hall.acceptor->pending(), 256u);
  EXPECT_TRUE(hall.serves());
}

TEST(Acceptor, WithoutDescriptorsItWaitsAndRecovers) {
  const DescriptorLimit few(256);
  Hall hall;
  for (int round = 0; round < 100; ++round) {
    // The clients first: they need descriptors themselves.
    const Descriptor first = testing::dial(hall.address);
    const Descriptor second = testing::dial(hall.address);
    std::vector<Descriptor> hogs;
    for (;;) {
      Descriptor one(::dup(0));
      if (!one) break;
      hogs.push_back(std::move(one));
    }
    // The one in reserve serves the first; then accepting pauses. However slow this machine is, the
    // first has only just come.
    hall.held = steady_clock().now();
    EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 1; }));
    for (int i = 0; i < 10; ++i) hall.acceptor->poll(hall.now());
    EXPECT_EQ(hall.acceptor->pending(), 1u);
    hogs.clear();
    *hall.held += std::chrono::milliseconds(100);
    EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 2; })) << "round " << round;
    EXPECT_EQ(::shutdown(first.get(), SHUT_RDWR), 0);
    EXPECT_EQ(::shutdown(second.get(), SHUT_RDWR), 0);
    EXPECT_TRUE(hall.until([&] { return hall.acceptor->pending() == 0; }));
    // The reserve is open again before the next round.
    hall.held.reset();
    EXPECT_TRUE(hall.serves());
    hall.arrived.clear();
  }
}

// spec: W7 with a store on loopback, without one, and without a secret, links listen on loopback
TEST(ListenAddresses, AreOfLoopbackUnlessOthersMayCome) {
  ConnectorOptions alone, on_loopback, without_secret;
  on_loopback.towards = "127.0.0.1";
  without_secret.towards = "192.0.2.1";
  without_secret.any_host = true;
  for (const auto& [options, others_may_come] :
       {std::pair(alone, true), std::pair(on_loopback, true), std::pair(without_secret, false)}) {
    const auto found = addresses_to_listen_on(options, others_may_come, soon());
    ASSERT_TRUE(found.ok()) << found.status().message();
    ASSERT_EQ(found->size(), 1u);
    EXPECT_TRUE(found->front().is_loopback()) << found->front().text();
  }
}

// spec: W7 an interface that is named is the only one
TEST(ListenAddresses, AreOfTheInterfacesNamed) {
  ConnectorOptions options;
  options.interfaces = {"lo"};
  options.towards = "192.0.2.1";
  const auto found = addresses_to_listen_on(options, true, soon());
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_EQ(found->size(), 1u);
  EXPECT_TRUE(found->front().is_loopback());
  options.interfaces = {"no-such-interface"};
  EXPECT_FALSE(addresses_to_listen_on(options, true, soon()).ok());
}

}  // namespace
}  // namespace muster::transport
