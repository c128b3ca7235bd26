// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/transport/byte_stream.h"
#include "core/transport/testing/test_wire.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

constexpr std::size_t kStrands = 3;

Result<std::size_t> write_text(ByteStream& stream, std::string_view text) {
  const ConstBytes piece = as_bytes(text);
  return stream.write({&piece, 1});
}

Result<std::string> read_text(ByteStream& stream, std::size_t most = 1000) {
  std::string text(most, '\0');
  const MutableBytes piece = std::as_writable_bytes(std::span(text));
  const auto got = stream.read({&piece, 1});
  if (!got) return got.status();
  text.resize(*got);
  return text;
}

std::string random_text(std::size_t bytes) {
  std::mt19937_64 random(testing::test_seed());
  std::string text(bytes, '\0');
  for (char& each : text) each = static_cast<char>(random());
  return text;
}

/// Two ends of a bundle over wires in memory, whose room is the test's.
class BundleOverWires : public ::testing::Test {
 protected:
  BundleOverWires() {
    std::array<std::vector<std::unique_ptr<ByteStream>>, 2> strands;
    for (auto& wire : wires) {
      for (std::size_t side = 0; side < 2; ++side)
        strands[side].push_back(std::make_unique<TestWireStream>(wire, side));
    }
    near = make_bundle_stream(std::move(strands[0]));
    far = make_bundle_stream(std::move(strands[1]));
  }

  std::array<std::shared_ptr<TestWire>, kStrands> wires{
      std::make_shared<TestWire>(), std::make_shared<TestWire>(), std::make_shared<TestWire>()};
  std::unique_ptr<ByteStream> near, far;
};

// spec: X4.connections the bytes and their order are those of one connection
TEST_F(BundleOverWires, BytesArriveInOrderHoweverLittleRoomThereIs) {
  std::mt19937_64 random(testing::test_seed());
  const std::string sent = random_text(1'000'003);
  std::string got;
  std::size_t taken = 0;
  while (got.size() < sent.size()) {
    for (auto& wire : wires) wire->room = random() % 30'000;
    std::vector<ConstBytes> pieces;
    for (std::size_t at = taken; at < sent.size() && pieces.size() < 100;) {
      const std::size_t bytes = std::min<std::size_t>(sent.size() - at, random() % 9'000);
      pieces.push_back(as_bytes(std::string_view(sent).substr(at, bytes)));
      at += bytes;
    }
    const auto took = near->write(pieces);
    ASSERT_TRUE(took.ok()) << took.status().message();
    taken += *took;
    const auto some = read_text(*far, 1 + random() % 100'000);
    ASSERT_TRUE(some.ok()) << some.status().message();
    got += *some;
  }
  EXPECT_EQ(got, sent);
}

/// A strand whose kernel has come so far.
class PlacedStream final : public ByteStream {
 public:
  explicit PlacedStream(SendPosition position) : position_(position) {}
  Result<std::size_t> write(std::span<const ConstBytes>) override { return std::size_t{0}; }
  Result<std::size_t> read(std::span<const MutableBytes>) override { return std::size_t{0}; }
  int descriptor() const override { return -1; }
  const char* kind() const override { return "placed"; }
  std::vector<SendPosition> send_positions() const override { return {position_}; }

 private:
  const SendPosition position_;
};

// spec: X4.connections how far a bundle has come is told of each of its connections
TEST(Bundle, TellsHowFarEachStrandHasCome) {
  std::vector<std::unique_ptr<ByteStream>> strands;
  for (std::uint64_t i = 1; i <= kStrands; ++i)
    strands.push_back(std::make_unique<PlacedStream>(SendPosition{10 * i, i}));
  const auto positions = make_bundle_stream(std::move(strands))->send_positions();
  ASSERT_EQ(positions.size(), kStrands);
  for (std::size_t i = 0; i < kStrands; ++i) {
    EXPECT_EQ(positions[i].written, 10 * (i + 1));
    EXPECT_EQ(positions[i].acknowledged, i + 1);
  }
}

// spec: X4.connections all connections of a link carry its bytes
TEST_F(BundleOverWires, EveryStrandCarriesItsShare) {
  const std::string sent = random_text(3'000'000);
  ASSERT_EQ(write_text(*near, sent).value(), sent.size());
  for (const auto& wire : wires) EXPECT_GT(wire->bytes[0].size(), sent.size() / 4);
}

TEST_F(BundleOverWires, StrandWithoutRoomHoldsUpNoOther) {
  wires[1]->room = 0;
  const std::string sent = random_text(500'000);
  ASSERT_EQ(write_text(*near, sent).value(), sent.size());
  EXPECT_TRUE(wires[1]->bytes[0].empty());
  EXPECT_EQ(read_text(*far, sent.size()).value(), sent);
}

// A piece that comes sooner on another strand waits for those that were sent before it.
TEST_F(BundleOverWires, PieceWaitsForTheOneBeforeIt) {
  ASSERT_EQ(write_text(*near, "first").value(), 5u);
  std::string held;
  for (auto& wire : wires) {
    if (wire->bytes[0].empty()) continue;
    held = std::exchange(wire->bytes[0], {});
    ASSERT_EQ(write_text(*near, "second").value(), 6u);
    EXPECT_EQ(read_text(*far).value(), "");
    wire->bytes[0].insert(0, held);
    break;
  }
  ASSERT_FALSE(held.empty());
  EXPECT_EQ(read_text(*far).value(), "firstsecond");
}

TEST_F(BundleOverWires, EndIsToldAfterEverythingThatWasSentBefore) {
  ASSERT_EQ(write_text(*near, "one").value(), 3u);
  ASSERT_EQ(write_text(*near, "two").value(), 3u);
  wires[0]->ended = true;
  EXPECT_EQ(read_text(*far).value(), "onetwo");
  EXPECT_EQ(read_text(*far).value(), "") << "the others may still bring something";
  for (auto& wire : wires) wire->ended = true;
  const auto end = read_text(*far);
  ASSERT_FALSE(end.ok());
  EXPECT_EQ(end.status().code(), Code::closed);
}

TEST_F(BundleOverWires, PieceThatIsLostIsNoSilence) {
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(write_text(*near, "piece").ok());
  for (auto& wire : wires) {
    // Each strand has two pieces; the one that has the first of all loses it.
    std::uint64_t number = 0;
    std::memcpy(&number, wire->bytes[0].data(), sizeof number);
    if (number == 0) wire->bytes[0].erase(0, wire->bytes[0].size() / 2);
  }
  const auto got = read_text(*far);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().code(), Code::internal);
}

TEST_F(BundleOverWires, NoHeaderIsBelievedThatCannotBe) {
  for (const std::uint32_t length : {std::uint32_t{0}, UINT32_MAX}) {
    std::vector<std::unique_ptr<ByteStream>> fresh;
    for (auto& wire : wires) fresh.push_back(std::make_unique<TestWireStream>(wire, 1));
    far = make_bundle_stream(std::move(fresh));
    std::array<char, 16> header{};
    std::memcpy(header.data() + 8, &length, sizeof length);
    wires[2]->bytes[0].assign(header.data(), header.size());
    const auto got = read_text(*far);
    ASSERT_FALSE(got.ok()) << length;
    EXPECT_EQ(got.status().code(), Code::internal);
  }
}

TEST_F(BundleOverWires, PieceThatComesTwiceIsNoBytes) {
  ASSERT_EQ(write_text(*near, "piece").value(), 5u);
  const auto carrier =
      std::ranges::find_if(wires, [](auto& wire) { return !wire->bytes[0].empty(); });
  ASSERT_NE(carrier, wires.end());
  (*carrier)->bytes[0] += std::string((*carrier)->bytes[0]);
  EXPECT_EQ(read_text(*far).value(), "piece");
  const auto again = read_text(*far);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), Code::internal);
}

/// Two ends of a bundle over sockets, which has a descriptor.
class BundleOverSockets : public ::testing::Test {
 protected:
  BundleOverSockets() {
    std::array<std::vector<std::unique_ptr<ByteStream>>, 2> strands;
    for (std::size_t i = 0; i < kStrands; ++i) {
      std::array<int, 2> pair{-1, -1};
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
      for (std::size_t side = 0; side < 2; ++side)
        strands[side].push_back(make_tcp_stream(GuardedDescriptor(Descriptor(pair[side]))));
    }
    near = make_bundle_stream(std::move(strands[0]));
    far = make_bundle_stream(std::move(strands[1]));
  }
  static bool has_news(const ByteStream& stream) {
    pollfd wait{stream.descriptor(), POLLIN, 0};
    return ::poll(&wait, 1, 0) > 0;
  }
  /// As a link does, which sleeps while the descriptor has no news.
  std::string read_all(std::size_t most = 100'000) {
    std::string all;
    while (has_news(*far)) {
      const auto got = read_text(*far, most);
      if (!got) {
        end = got.status();
        break;
      }
      all += *got;
    }
    return all;
  }

  std::unique_ptr<ByteStream> near, far;
  Status end;
};

TEST_F(BundleOverSockets, ReaderIsWokenByEveryStrandAndSleepsInBetween) {
  EXPECT_EQ(read_all(), "");
  for (std::size_t i = 0; i < 2 * kStrands; ++i) {
    EXPECT_FALSE(has_news(*far));
    ASSERT_TRUE(write_text(*near, "news").ok());
    EXPECT_TRUE(has_news(*far)) << i;
    EXPECT_EQ(read_all(3), "news");
  }
}

// A write that finds strands full takes the news of all of them.
TEST_F(BundleOverSockets, WriterLeavesTheReaderItsNews) {
  EXPECT_EQ(read_all(), "");
  ASSERT_TRUE(write_text(*near, "one").ok());
  ASSERT_TRUE(write_text(*far, "answer").ok());
  EXPECT_TRUE(has_news(*far));
  EXPECT_EQ(read_all(), "one");
  const std::string much = random_text(20'000'000);
  ASSERT_LT(write_text(*far, much).value(), much.size());
  ASSERT_TRUE(far->full());
  EXPECT_FALSE(has_news(*far));
  ASSERT_TRUE(write_text(*near, "two").ok());
  EXPECT_EQ(write_text(*far, much).value(), 0u);
  EXPECT_TRUE(has_news(*far));
  EXPECT_EQ(read_all(), "two");
  EXPECT_FALSE(has_news(*far));
}

// A read that ends with the reader's memory leaves the descriptor readable, so the owner may go on
// with others first.
TEST_F(BundleOverSockets, ReaderMayGoOnLater) {
  const std::string sent = random_text(100'000);
  ASSERT_EQ(write_text(*near, sent).value(), sent.size());
  std::string got;
  while (got.size() < sent.size()) {
    ASSERT_TRUE(has_news(*far)) << got.size();
    got += read_text(*far, 7'000).value();
  }
  EXPECT_EQ(got, sent);
  EXPECT_EQ(read_all(), "");
  EXPECT_FALSE(has_news(*far));
}

TEST_F(BundleOverSockets, WriterIsWokenWhereThereIsRoomAgain) {
  EXPECT_EQ(read_text(*near).value(), "");
  const std::string sent = random_text(20'000'000);
  std::size_t taken = 0;
  std::string got;
  for (int rounds = 0; got.size() < sent.size(); ++rounds) {
    ASSERT_LT(rounds, 1'000'000);
    const auto took = write_text(*near, std::string_view(sent).substr(taken));
    ASSERT_TRUE(took.ok()) << took.status().message();
    taken += *took;
    EXPECT_TRUE(near->full() || taken == sent.size());
    got += read_all();
    // All that was in flight is read, so every strand has room and its descriptor says so.
    ASSERT_TRUE(has_news(*near) || taken == sent.size());
  }
  EXPECT_EQ(got, sent);
}

// The end may come together with the last bytes, behind a piece that is not whole.
TEST_F(BundleOverSockets, PeerThatEndsInTheMiddleIsNoticed) {
  const std::string sent = random_text(20'000'000);
  const auto took = write_text(*near, sent);
  ASSERT_TRUE(took.ok());
  ASSERT_LT(*took, sent.size());
  near.reset();
  const std::string got = read_all();
  EXPECT_EQ(got, sent.substr(0, got.size()));
  EXPECT_EQ(end.code(), Code::closed) << end.message();
}

}  // namespace
}  // namespace muster::transport
