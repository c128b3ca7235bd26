// SPDX-License-Identifier: BSD-3-Clause
// A man in the middle between a store and its clients, of every role that it serves.

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>

#include "core/store/job_keys.h"
#include "core/store/testing/tcp_servers.h"
#include "testing/budget.h"
#include "testing/relay.h"
#include "testing/seed.h"

namespace muster::store {
namespace {

using Role = Handshake::Role;

/// One that observers may read as well.
const std::string kKey = "job/trace/0";

std::string passed_on(int, std::size_t, std::string bytes) { return bytes; }

class TcpStoreRelay : public ::testing::TestWithParam<Role> {
 protected:
  TcpStoreRelay() {
    EXPECT_TRUE(server->set("job/trace/job", encode(JobAnnouncement{"a job", 1, 1})).ok());
  }
  /// By way of `relay`.
  TcpStoreOptions through(const testing::Relay& relay) const {
    TcpStoreOptions options = client_options(*server);
    options.host = relay.address().host();
    options.role = GetParam();
    if (GetParam() == Role::observer) options.secret = kTcpSecret.observer();
    options.within_host = false;
    options.timeout = std::chrono::seconds(5);
    return options;
  }
  SocketAddress target() const { return testing::loopback_address(server->port()); }
  /// The store's own port, which its keys are bound to, at another address.
  SocketAddress relayed() const { return *SocketAddress::numeric("127.0.0.2", server->port()); }

  bool observes() const { return GetParam() == Role::observer; }

  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
};
INSTANTIATE_TEST_SUITE_P(Roles, TcpStoreRelay,
                         ::testing::Values(Role::store, Role::launcher, Role::observer));

TEST_P(TcpStoreRelay, WhatIsPassedOnAsItIsWorks) {
  const testing::Relay relay(target(), passed_on, relayed());
  const auto store = made(make_tcp_store(through(relay)));
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(server->set(kKey, std::string(300'000, 'x')).ok());
  EXPECT_EQ(*store->get(kKey), std::string(300'000, 'x'));
}

/// Changes byte `at` of the first `connections` answers.
testing::Relay::Tamper forge(int connections, std::size_t at) {
  auto left = std::make_shared<std::atomic<int>>(connections);
  return [=](int way, std::size_t before, std::string bytes) {
    if (way != 1 || at < before || at - before >= bytes.size() || (*left)-- <= 0) return bytes;
    bytes[at - before] = static_cast<char>(bytes[at - before] ^ 1);
    return bytes;
  };
}

// The bytes are in each field of the store's greeting, in the answer behind it, and in its TLS.
// spec: W1 what is forged before the keys are made ends no joining rank: it tries again
TEST_P(TcpStoreRelay, AForgedAnswerInTheClearEndsNobody) {
  if (observes()) return;  // they join nothing, and are told at once
  for (const std::size_t at : {0U, 8U, 10U, 16U, 24U, 32U, 64U, 100U, 127U, 128U, 140U, 200U}) {
    SCOPED_TRACE("byte " + std::to_string(at));
    const testing::Relay relay(target(), forge(2, at), relayed());
    TcpStoreOptions options = through(relay);
    options.timeout = testing::kMustHappen;
    const auto store = make_tcp_store(options);
    EXPECT_TRUE(store.ok()) << store.status().message();
  }
}

// spec: W1 an answer in the clear that comes each time is told as one that nothing authenticates
TEST_P(TcpStoreRelay, AnAnswerInTheClearIsToldAsUnauthenticated) {
  const testing::Relay relay(target(), forge(1'000'000, 40), relayed());
  const Status status = make_tcp_store(through(relay)).status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(mentions(status, "in the clear (unauthenticated)")) << status.message();
}

// Two jobs with one secret, at two ports or with two names: the relay leads a client of one to the
// store of the other.
// spec: W1 a relay cannot lead a client of a job to the store of another with the same secret
TEST_P(TcpStoreRelay, AnotherJobsStoreIsRefused) {
  const auto other = made(make_tcp_store(server_options()));
  const testing::Relay to_other_port(testing::loopback_address(other->port()), passed_on,
                                     relayed());
  const Status port = make_tcp_store(through(to_other_port)).status();
  EXPECT_EQ(port.code(), Code::refused);
  EXPECT_TRUE(mentions(port, "another job") || mentions(port, "job with hash")) << port.message();

  if (GetParam() == Role::observer) return;  // they need not know a job's name
  auto options = client_options(*server);
  options.role = GetParam();
  options.job = "another name";
  const Status name = make_tcp_store(options).status();
  EXPECT_EQ(name.code(), Code::refused);
}

// spec: W1 a store's connection that is cut is told as one that has no authenticated end
TEST_P(TcpStoreRelay, ACutIsToldWithoutAnEnd) {
  auto cut = std::make_shared<std::atomic<bool>>(false);
  const testing::Relay relay(target(), passed_on, relayed(), [cut] { return cut->load(); });
  const auto store = made(make_tcp_store(through(relay)));
  ASSERT_NE(store, nullptr);
  *cut = true;
  const Status status = store->get(kKey).status();
  EXPECT_TRUE(mentions(status, "no authenticated end")) << status.message();
  EXPECT_FALSE(mentions(status, "tampers")) << status.message();
}

// One byte is changed, somewhere in what is said before the connection is open or after.
// spec: W1 a relay that alters a byte between a store and its client gets nothing accepted
TEST_P(TcpStoreRelay, NothingIsAcceptedThatWasChanged) {
  std::mt19937_64 random(testing::test_seed() + static_cast<std::uint64_t>(GetParam()));
  ASSERT_TRUE(server->set(kKey, std::string(3000, 'x')).ok());
  for (int attempt = 0; attempt < testing::test_rounds(10, 100); ++attempt) {
    const int direction = static_cast<int>(random() % 2);
    // Behind the greetings, and behind the handshake: about 700 bytes of either side.
    const std::size_t at = 1000 + random() % 500;
    SCOPED_TRACE("byte " + std::to_string(at) + " of direction " + std::to_string(direction));
    const testing::Relay relay(target(), testing::flip(direction, at), relayed());
    const auto store = made(make_tcp_store(through(relay)));
    ASSERT_NE(store, nullptr);
    const std::string value(3000, 'y');
    // As many bytes of an observer, which may not ask that and is told so.
    const Status set = observes() ? store->get("no/" + value, Duration::zero()).status()
                                  : store->set("other", value);
    const auto got = store->get(kKey);
    const bool answered = observes() ? mentions(set, "an observer may") : set.ok();
    EXPECT_TRUE(!answered || !got.ok());
    EXPECT_TRUE(!got.ok() || *got == std::string(3000, 'x'));
    const auto kept = server->check(std::array{std::string("other")});
    if (kept.ok() && *kept) {
      EXPECT_EQ(*server->get("other"), value);
    }
    if (direction == 1) {
      const Status& seen = answered ? got.status() : set;
      EXPECT_TRUE(mentions(seen, "tampers")) << seen.message();
    }
    ASSERT_TRUE(server->delete_key("other").ok());
  }
}

}  // namespace
}  // namespace muster::store
