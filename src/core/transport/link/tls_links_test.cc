// SPDX-License-Identifier: BSD-3-Clause
// Links over TCP with a man in the middle, and with ranks that protect payloads differently. Ranks
// are threads whose addresses lead through relays of the test's.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/store/factory.h"
#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "core/transport/peer_address.h"
#include "core/transport/testing/transfer_expectations.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/relay.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

using Payloads = Handshake::Payloads;
using Role = Handshake::Role;
using testing::Relay;

constexpr Duration kRelayLimit = muster::testing::kMustHappen;
constexpr int kRelayed = 2;

std::string passed_on(int, std::size_t, std::string bytes) { return bytes; }

/// Two ranks that reach each other by way of relays.
class RelayedJob {
 public:
  RelayedJob(Role role, std::array<Payloads, kRelayed> payloads, const Relay::Tamper& tamper) {
    const auto store = store::make_hash_store(kRelayLimit);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRelayed; ++rank)
      threads.emplace_back([&, rank] {
        ConnectorOptions connector;
        connector.rank = rank;
        connector.world_size = kRelayed;
        connector.job = "relayed";
        connector.shared_memory = false;
        connector.role = role;
        connector.payloads = payloads[static_cast<std::size_t>(rank)];
        FabricOptions options;
        options.rank = rank;
        options.world_size = kRelayed;
        options.timeout = kRelayLimit;
        options.heartbeat_limit = Duration::zero();
        const Exchange over_store = exchange_over(store, "meeting", rank, kRelayed,
                                                  deadline_after(steady_clock(), kRelayLimit));
        auto fabric = Fabric::create(
            options, make_socket_connector(connector, Secret::given("a secret for tests only")),
            [&](const std::string& round, const std::string& mine) {
              auto all = over_store(round, mine);
              if (round == "contacts" && all.ok())
                lead_astray((*all)[static_cast<std::size_t>(1 - rank)], rank, tamper);
              return all;
            });
        ASSERT_TRUE(fabric.ok()) << fabric.status().message();
        fabrics[static_cast<std::size_t>(rank)] = std::move(*fabric);
      });
    for (auto& thread : threads) thread.join();
  }

  /// Both ranks send `bytes` to each other at once; how each one's receive ended.
  std::array<Status, kRelayed> talk(std::size_t bytes) {
    std::array<Status, kRelayed> ends;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRelayed; ++rank)
      threads.emplace_back([&, rank] {
        Fabric& fabric = *fabrics[static_cast<std::size_t>(rank)];
        const std::string out(bytes, static_cast<char>('a' + rank));
        std::string in(bytes, '?');
        const TransferRef receive =
            fabric.bootstrap().receive(1 - rank, 1, std::as_writable_bytes(std::span(in)), {});
        const TransferRef send = fabric.bootstrap().send(1 - rank, 1, as_bytes(out), {});
        const Status received = finish(fabric, receive);
        const Status sent = finish(fabric, send);
        ends[static_cast<std::size_t>(rank)] = received.ok() ? sent : received;
        if (received.ok()) {
          EXPECT_EQ(in, std::string(bytes, static_cast<char>('a' + 1 - rank)));
        }
      });
    for (auto& thread : threads) thread.join();
    return ends;
  }

  std::array<std::unique_ptr<Fabric>, kRelayed> fabrics;

 private:
  void lead_astray(std::string& contact, int reader, const Relay::Tamper& tamper) {
    PeerAddress address = *decode_peer_address(contact, 1 - reader);
    auto& relay = relays_[static_cast<std::size_t>(reader)];
    relay = std::make_unique<Relay>(address.addresses[0], tamper);
    address.addresses = {relay->address()};
    contact = encode(address);
  }

  std::array<std::unique_ptr<Relay>, kRelayed> relays_;
};

class RelayedLinks : public ::testing::TestWithParam<Role> {
 protected:
  Role role() const { return GetParam(); }
  std::array<Payloads, kRelayed> payloads() const {
    return {Payloads::encrypted, Payloads::encrypted};
  }
};
INSTANTIATE_TEST_SUITE_P(Roles, RelayedLinks, ::testing::Values(Role::link, Role::rpc));

TEST_P(RelayedLinks, WhatIsPassedOnAsItIsWorks) {
  RelayedJob job(role(), payloads(), passed_on);
  for (const Status& end : job.talk(3'000'000)) EXPECT_TRUE(end.ok()) << end.message();
}

// spec: W1 a relay that alters a byte of a link ends it, and the error names tampering
TEST_P(RelayedLinks, WhatIsChangedEndsTheLinkAndSaysSo) {
  std::mt19937_64 random(testing::test_seed());
  for (int attempt = 0; attempt < testing::test_rounds(5, 50); ++attempt) {
    const int direction = static_cast<int>(random() % 2);
    const std::size_t at = 2'000 + random() % 100'000;
    SCOPED_TRACE("byte " + std::to_string(at) + " of direction " + std::to_string(direction));
    RelayedJob job(role(), payloads(), testing::flip(direction, at));
    const auto ends = job.talk(200'000);
    std::string said;
    for (const Status& end : ends) said += end.message() + "\n";
    EXPECT_NE(said.find("tampers"), std::string::npos) << said;
  }
}

// spec: W1 what is forged before the keys of a link are made ends no rank: it connects again
TEST_P(RelayedLinks, AForgedAnswerInTheClearEndsNobody) {
  for (const std::size_t at : {0U, 8U, 24U, 40U, 100U, 128U, 140U}) {
    SCOPED_TRACE("byte " + std::to_string(at));
    auto left = std::make_shared<std::atomic<int>>(2);
    RelayedJob job(role(), payloads(), [=](int way, std::size_t before, std::string bytes) {
      if (way == 1 && at >= before && at - before < bytes.size() && (*left)-- > 0)
        bytes[at - before] = static_cast<char>(bytes[at - before] ^ 1);
      return bytes;
    });
    for (const Status& end : job.talk(1000)) EXPECT_TRUE(end.ok()) << end.message();
  }
}

// spec: A1 ranks that protect payloads differently are told so
TEST(RelayedLinksDiffer, RanksMustProtectPayloadsAlike) {
  RelayedJob job(Role::link, {Payloads::encrypted, Payloads::plain}, passed_on);
  for (const Status& end : job.talk(1000)) {
    EXPECT_FALSE(end.ok());
    EXPECT_NE(end.message().find("MUSTER_TLS"), std::string::npos) << end.message();
  }
}

}  // namespace
}  // namespace muster::transport
