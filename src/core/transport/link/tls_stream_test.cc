// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/security/tls_session.h"
#include "core/transport/testing/test_wire.h"
#include "core/tunables/tunables_fixed.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

using Payloads = Handshake::Payloads;

class TlsStreams : public ::testing::TestWithParam<Payloads> {
 protected:
  TlsStreams() {
    const Secret secret = Secret::given("the secret of the tests of streams");
    const auto session = [&](TlsSession::Side side, std::int32_t rank) {
      Handshake::Hello hello{.role = Handshake::Role::link, .rank = rank};
      hello.payloads = GetParam();
      return TlsSession(side, hello, secret);
    };
    TlsSession connector = session(TlsSession::Side::connector, 0),
               acceptor = session(TlsSession::Side::acceptor, 1);
    while (!connector.done() || !acceptor.done()) {
      acceptor.feed(as_bytes(connector.take_output()));
      connector.feed(as_bytes(acceptor.take_output()));
    }
    streams = {make_tls_stream(std::make_unique<TestWireStream>(wire, 0), std::move(connector)),
               make_tls_stream(std::make_unique<TestWireStream>(wire, 1), std::move(acceptor))};
  }
  Result<std::size_t> write(std::string_view text) {
    const ConstBytes piece = as_bytes(text);
    return streams[0]->write({&piece, 1});
  }
  Result<std::string> read(std::size_t most) {
    std::string text(most, '\0');
    const MutableBytes piece = std::as_writable_bytes(std::span(text));
    const auto got = streams[1]->read({&piece, 1});
    if (!got) return got.status();
    text.resize(*got);
    return text;
  }

  std::shared_ptr<TestWire> wire = std::make_shared<TestWire>();
  std::array<std::unique_ptr<ByteStream>, 2> streams;
};
INSTANTIATE_TEST_SUITE_P(Payloads, TlsStreams,
                         ::testing::Values(Payloads::encrypted, Payloads::plain));

// A bundle relies on this: a piece that is cut holds up those behind it.
TEST_P(TlsStreams, PieceOfABundleIsTakenWholeWhileNothingIsUnsent) {
  constexpr std::size_t kPiece = fixed::kIoBuffer - 1024;
  const std::string text(kPiece, 'x');
  for (const std::size_t parts : {std::size_t{1}, std::size_t{2}, kPiece / 4096, kPiece / 1100}) {
    wire->room = 0;
    std::vector<ConstBytes> pieces{as_bytes(text).first(16)};
    for (std::size_t left = kPiece; left > 0;) {
      // The second of two parts is small, and the first nearly fills the output.
      const std::size_t most = parts == 2 ? kPiece - 36 : kPiece / parts + 1;
      pieces.push_back(as_bytes(text).first(std::min(left, most)));
      left -= pieces.back().size();
    }
    EXPECT_EQ(streams[0]->write(pieces).value(), 16 + kPiece) << parts;
    wire->room = SIZE_MAX;
    EXPECT_EQ(streams[0]->write({}).value(), 0u);
    EXPECT_FALSE(streams[0]->has_unsent());
  }
}

TEST_P(TlsStreams, BytesArriveWholeHoweverLittleRoomThereIs) {
  std::mt19937_64 random(testing::test_seed());
  std::string sent(1'000'003, '\0'), got;
  for (char& each : sent) each = static_cast<char>(random());
  std::size_t taken = 0;
  while (got.size() < sent.size()) {
    wire->room = random() % 50'000;
    // Pieces of any size, more of them than a stream looks at in one call.
    std::vector<ConstBytes> pieces;
    for (std::size_t at = taken; at < sent.size() && pieces.size() < 100;) {
      const std::size_t bytes = std::min<std::size_t>(sent.size() - at, random() % 9'000);
      pieces.push_back(as_bytes(std::string_view(sent).substr(at, bytes)));
      at += bytes;
    }
    const auto took = streams[0]->write(pieces);
    ASSERT_TRUE(took.ok()) << took.status().message();
    taken += *took;
    ASSERT_LT(taken, got.size() + 600'000) << "it keeps what the wire does not take";
    const auto some = read(1 + random() % 100'000);
    ASSERT_TRUE(some.ok()) << some.status().message();
    got += *some;
  }
  EXPECT_EQ(got, sent);
  EXPECT_FALSE(streams[0]->has_unsent());
}

// Bytes that it took and could not send leave with the next write, even one of nothing.
TEST_P(TlsStreams, TellsWhatIsNotSent) {
  wire->room = 10;
  ASSERT_EQ(write("hello").value(), 5U);
  EXPECT_TRUE(streams[0]->has_unsent());
  EXPECT_EQ(write("and more").value(), 0U);
  EXPECT_EQ(read(100).value(), "");
  wire->room = SIZE_MAX;
  EXPECT_EQ(streams[0]->write({}).value(), 0U);
  EXPECT_FALSE(streams[0]->has_unsent());
  EXPECT_EQ(read(100).value(), "hello");
}

// A reader that takes less than has come is told, since the wire has nothing more to tell.
TEST_P(TlsStreams, TellsWhatItHolds) {
  ASSERT_EQ(write(std::string(9'000, 'x')).value(), 9'000U);
  EXPECT_FALSE(streams[1]->holds_more());  // still on the wire
  EXPECT_EQ(read(1).value(), "x");
  EXPECT_TRUE(streams[1]->holds_more());
  EXPECT_EQ(read(8'999).value().size(), 8'999U);
  EXPECT_FALSE(streams[1]->holds_more());
}

TEST_P(TlsStreams, EndsBehindTheLastByte) {
  ASSERT_TRUE(write("last words").ok());
  wire->ended = true;
  EXPECT_EQ(read(100).value(), "last words");
  EXPECT_EQ(read(100).status().code(), Code::closed);
}

TEST_P(TlsStreams, WhatWasChangedIsRefusedForGood) {
  ASSERT_TRUE(write("first").ok());
  const std::size_t at = wire->bytes[0].size();
  ASSERT_TRUE(write("second").ok());
  wire->bytes[0][at + 10] ^= 1;
  EXPECT_EQ(read(100).value(), "first");
  EXPECT_TRUE(streams[1]->holds_more());  // the failure, which is to be told
  for (int again = 0; again < 2; ++again) {
    const Status status = read(100).status();
    EXPECT_EQ(status.code(), Code::refused);
    EXPECT_NE(status.message().find("tampers"), std::string::npos) << status.message();
    EXPECT_EQ(status.ranks(), std::vector<int>{0});
  }
}

// Large payloads are left readable if the job says so; all else is encrypted.
TEST_P(TlsStreams, PayloadsAloneAreLeftReadable) {
  ASSERT_TRUE(write("names and numbers").ok());
  EXPECT_EQ(wire->bytes[0].find("names"), std::string::npos);
  ASSERT_TRUE(write(std::string(8'000, 'w')).ok());
  const bool readable = wire->bytes[0].find("wwwwwwww") != std::string::npos;
  EXPECT_EQ(readable, GetParam() != Payloads::encrypted);
  if (!readable) return;
  wire->bytes[0][wire->bytes[0].find("wwww") + 2] = 'v';
  std::string got = read(17).value();
  if (const auto rest = read(8'000); rest.ok()) got += *rest;
  EXPECT_EQ(got.find('v') != std::string::npos, GetParam() == Payloads::plain);
}

// Bytes of a payload cannot become, or push away, what is not payload.
TEST_P(TlsStreams, ThePlaceOfAPayloadIsAlwaysProtected) {
  ASSERT_TRUE(write(std::string(8'000, 'w')).ok());
  const std::size_t middle = wire->bytes[0].size() / 2;
  ASSERT_TRUE(write("behind it" + std::string(3'000, '.')).ok());
  wire->bytes[0].erase(middle, 100);
  std::string got;
  for (int i = 0; i < 4; ++i) {
    const auto some = read(10'000);
    if (!some.ok()) break;
    got += *some;
  }
  EXPECT_EQ(got.find("behind"), std::string::npos);
  EXPECT_FALSE(read(1).ok());
}

}  // namespace
}  // namespace muster::transport
