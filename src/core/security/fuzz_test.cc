// SPDX-License-Identifier: BSD-3-Clause
// Fuzzers of what base/ parses from outside: the greeting of every connection, numbers and flags of
// the environment, addresses.

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/base/environment.h"
#include "core/net/socket_address.h"
#include "core/security/handshake.h"
#include "core/security/tls_session.h"
#include "testing/fuzz.h"

namespace muster {
namespace {

using Side = Handshake::Side;
using testing::Fuzz;

Handshake::Hello introduction(std::int32_t rank) {
  return {.role = Handshake::Role::link,
          .rank = rank,
          .world_size = 8,
          .job = "job",
          .build = 1,
          .note = 7};
}
const Secret kFuzzSecret = Secret::given("the secret of the fuzzers' tests");

/// Feeds in pieces; the bytes that were taken.
std::size_t feed(Fuzz& fuzz, Handshake& side, const std::string& bytes) {
  std::size_t eaten = 0;
  for (const auto piece : fuzz.pieces(bytes)) {
    const std::size_t now = side.feed(as_bytes(piece));
    EXPECT_LE(now, piece.size());
    eaten += now;
    if (now < piece.size()) break;
  }
  return eaten;
}

// spec: C2 unauthenticated peers: whatever comes instead of a greeting proves nothing, and is
// answered by no more than the fixed sizes
TEST(HandshakeFuzz, DamagedGreetingsProveNothing) {
  Fuzz fuzz(1);
  testing::FuzzRun run(2000);
  for (int round = 0; run.goes_on(); ++round) {
    Handshake connector(Side::connector, introduction(3), kFuzzSecret),
        acceptor(Side::acceptor, introduction(5), kFuzzSecret);
    const std::string greeting = connector.take_output();
    const std::string sent = fuzz.one_in(4) ? fuzz.noise(300) : fuzz.damaged(greeting);
    if (sent.substr(0, greeting.size()) == greeting) continue;
    EXPECT_LE(feed(fuzz, acceptor, sent), greeting.size() + sizeof(Secret::Proof));
    const std::string answer = acceptor.take_output();
    EXPECT_LE(answer.size(), greeting.size() + 1);
    feed(fuzz, connector, answer);
    feed(fuzz, acceptor, connector.take_output());
    EXPECT_FALSE(acceptor.done()) << "round " << round;
    EXPECT_FALSE(connector.done()) << "round " << round;
    EXPECT_TRUE(!acceptor.failed() || acceptor.failure().code() == Code::refused);
  }
}

// spec: C2.refusal a listener that answers with anything but its proof is refused by the one who
// connects
TEST(HandshakeFuzz, DamagedAnswersProveNothing) {
  Fuzz fuzz(2);
  testing::FuzzRun run(2000);
  for (int round = 0; run.goes_on(); ++round) {
    Handshake connector(Side::connector, introduction(3), kFuzzSecret),
        acceptor(Side::acceptor, introduction(5), kFuzzSecret);
    acceptor.feed(as_bytes(connector.take_output()));
    std::string answer = acceptor.take_output();
    const bool greeting_first = fuzz.one_in(2);
    if (!greeting_first) {
      connector.feed(as_bytes(answer));
      acceptor.feed(as_bytes(connector.take_output()));
      answer = acceptor.take_output();
    }
    const std::string sent = fuzz.damaged(answer) + fuzz.noise(100);
    if (sent.starts_with(answer)) continue;  // noise may mend what was cut off
    feed(fuzz, connector, sent);
    EXPECT_FALSE(connector.done()) << "round " << round;
  }
}

/// The text of all that has come and can be decrypted.
std::string all_of(TlsSession& session) {
  std::string text(64 * 1024, '\0');
  const MutableBytes piece = std::as_writable_bytes(std::span(text));
  const auto got = session.done() ? session.read({&piece, 1}) : Result<std::size_t>(0);
  text.resize(got.ok() ? *got : 0);
  return text;
}

// spec: C2 unauthenticated peers: whatever comes instead of a TLS connection's bytes, before or
// after it is open, is refused; nothing is read that nobody has said
TEST(TlsSessionFuzz, DamagedConnectionsSayNothing) {
  Fuzz fuzz(5);
  testing::FuzzRun run(300);
  for (int round = 0; run.goes_on(); ++round) {
    SCOPED_TRACE(round);
    Handshake::Hello near = introduction(3), far = introduction(5);
    near.payloads = far.payloads = static_cast<Handshake::Payloads>(fuzz.below(2));
    std::array<TlsSession, 2> sides{TlsSession(Side::connector, near, kFuzzSecret),
                                    TlsSession(Side::acceptor, far, kFuzzSecret)};
    std::array<std::string, 2> said, heard;
    std::size_t intact = fuzz.below(12);  // turns, before one is damaged
    for (int turn = 0; turn < 16; ++turn) {
      const std::size_t me = static_cast<std::size_t>(turn) % 2;
      if (sides[me].done()) {
        const std::string text = fuzz.noise(fuzz.one_in(2) ? 100 : 20'000);
        const ConstBytes piece = as_bytes(text);
        if (const auto taken = sides[me].write({&piece, 1}); taken.ok())
          said[me] += text.substr(0, *taken);
      }
      std::string bytes = sides[me].take_output();
      if (intact-- == 0) bytes = fuzz.one_in(4) ? fuzz.noise(300) : fuzz.damaged(bytes);
      for (const auto piece : fuzz.pieces(bytes)) sides[1 - me].feed(as_bytes(piece));
      heard[1 - me] += all_of(sides[1 - me]);
      EXPECT_LE(sides[me].output().size(), 64 * 1024u);
    }
    for (const std::size_t me : {0, 1})
      ASSERT_TRUE(std::string_view(said[me]).starts_with(heard[1 - me]));
  }
}

// spec: C2 unauthenticated peers: a whole greeting and then anything but TLS
TEST(TlsSessionFuzz, NoiseBehindAGreetingIsRefused) {
  Fuzz fuzz(6);
  for (testing::FuzzRun run(500); run.goes_on();) {
    TlsSession connector(Side::connector, introduction(3), kFuzzSecret),
        acceptor(Side::acceptor, introduction(5), kFuzzSecret);
    const std::string flight = connector.take_output();
    // Sometimes it looks like a record.
    std::string noise = fuzz.noise(fuzz.one_in(10) ? 20'000 : 2000);
    if (fuzz.one_in(2)) noise.insert(0, flight.substr(128, 1 + fuzz.below(200)));
    acceptor.feed(as_bytes(flight).first(128));
    for (const auto piece : fuzz.pieces(noise)) acceptor.feed(as_bytes(piece));
    EXPECT_FALSE(acceptor.done());
    EXPECT_LE(acceptor.output().size(), 4096u);
  }
}

// spec: B9 malformed variables: named, or read as what they say
TEST(EnvironmentFuzz, NumbersAndFlagsAreReadWholeOrRefusedByName) {
  Fuzz fuzz(3);
  constexpr const char* kName = "MUSTER_TEST_FUZZED";
  for (testing::FuzzRun run(3000); run.goes_on();) {
    std::string text = fuzz.one_in(3) ? fuzz.damaged("4294967296")
                                      : fuzz.babble(24, "0123456789+-. xeEtTrRuUyYoOnNfFsSaAlL");
    std::erase(text, '\0');
    ::setenv(kName, text.c_str(), 1);
    const auto number = env_integer(kName, -1000, 1'000'000'000);
    if (!number.ok()) {
      EXPECT_NE(number.status().message().find(kName), std::string::npos);
    } else if (number->has_value()) {
      EXPECT_GE(**number, -1000);
      EXPECT_LE(**number, 1'000'000'000);
      EXPECT_EQ(std::strtoll(text.c_str(), nullptr, 10), **number) << text;
    } else {
      EXPECT_EQ(text, "");
    }
    const auto flag = env_flag(kName);
    EXPECT_TRUE(flag.ok() || flag.status().message().find(kName) != std::string::npos);
  }
  ::unsetenv(kName);
}

TEST(SocketAddressFuzz, NumericTextsAreReadBackOrRefused) {
  Fuzz fuzz(4);
  for (testing::FuzzRun run(3000); run.goes_on();) {
    std::string text = fuzz.one_in(2) ? fuzz.damaged(fuzz.one_in(2) ? "[2001:db8::ff00:42:8329]"
                                                                    : "192.168.100.200")
                                      : fuzz.babble(45, "0123456789abcdef:.[]%/");
    const auto address = SocketAddress::numeric(text, 29500);
    if (!address.ok()) continue;
    const auto again = SocketAddress::numeric(address->host(), 29500);
    ASSERT_TRUE(again.ok()) << text << " became " << address->host();
    EXPECT_EQ(again->text(), address->text());
    EXPECT_EQ(address->port(), 29500);
  }
}

}  // namespace
}  // namespace muster
