// A man in the middle between a store and its clients, of every role that it serves.

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "muster/store/tcp_store_test_support.h"
#include "muster/testing/budget.h"
#include "muster/testing/relay.h"
#include "muster/testing/seed.h"

namespace muster::store {
namespace {

using Role = Handshake::Role;

class TcpStoreRelay : public ::testing::TestWithParam<Role> {
 protected:
  /// By way of `relay`.
  TcpStoreOptions through(const testing::Relay& relay) const {
    TcpStoreOptions options = client_options(*server);
    options.port = relay.address().port();
    options.role = GetParam();
    options.within_host = false;
    options.timeout = std::chrono::seconds(5);
    return options;
  }
  SocketAddress target() const { return testing::loopback_address(server->port()); }

  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
};
INSTANTIATE_TEST_SUITE_P(Roles, TcpStoreRelay,
                         ::testing::Values(Role::store, Role::launcher, Role::observer));

TEST_P(TcpStoreRelay, WhatIsPassedOnAsItIsWorks) {
  const testing::Relay relay(target(), [](int, std::size_t, std::string bytes) { return bytes; });
  const auto store = made(make_tcp_store(through(relay)));
  ASSERT_NE(store, nullptr);
  EXPECT_TRUE(store->set("key", std::string(300'000, 'x')).ok());
  EXPECT_EQ(*store->get("key"), std::string(300'000, 'x'));
}

// One byte is changed, somewhere in what is said before the connection is open or after.
// spec: W1 a relay that alters a byte between a store and its client gets nothing accepted
TEST_P(TcpStoreRelay, NothingIsAcceptedThatWasChanged) {
  std::mt19937_64 random(testing::test_seed() + static_cast<std::uint64_t>(GetParam()));
  ASSERT_TRUE(server->set("key", std::string(3000, 'x')).ok());
  for (int attempt = 0; attempt < testing::test_rounds(10, 100); ++attempt) {
    const int direction = static_cast<int>(random() % 2);
    // Behind the greetings, and behind the handshake: about 700 bytes of either side.
    const std::size_t at = 1000 + random() % 500;
    SCOPED_TRACE("byte " + std::to_string(at) + " of direction " + std::to_string(direction));
    const testing::Relay relay(target(), testing::flip(direction, at));
    const auto store = made(make_tcp_store(through(relay)));
    ASSERT_NE(store, nullptr);
    const std::string value(3000, 'y');
    const Status set = store->set("other", value);
    const auto got = store->get("key");
    EXPECT_TRUE(!set.ok() || !got.ok());
    EXPECT_TRUE(!got.ok() || *got == std::string(3000, 'x'));
    const auto kept = server->check(std::array{std::string("other")});
    if (kept.ok() && *kept) {
      EXPECT_EQ(*server->get("other"), value);
    }
    if (direction == 1) {
      const Status& seen = set.ok() ? got.status() : set;
      EXPECT_TRUE(mentions(seen, "tampers")) << seen.message();
    }
    ASSERT_TRUE(server->delete_key("other").ok());
  }
}

}  // namespace
}  // namespace muster::store
