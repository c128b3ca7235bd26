// SPDX-License-Identifier: BSD-3-Clause
// Messages that go and come without a transfer: one real fabric against a peer that the test plays
// frame by frame.
#include <gtest/gtest.h>

#include "core/base/dtype.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/channel_table.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"

namespace muster::transport {
namespace {

Fingerprint of(DType dtype) {
  Fingerprint call;
  call.dtype = static_cast<std::uint8_t>(dtype);
  return call;
}

/// A peer whose messages stand in memory; they are not taken in before something looks.
struct MemoryJob : ScriptedJob {
  explicit MemoryJob(int ranks = 2) : ScriptedJob(ranks) { wire(1).in_memory = true; }
  void put(const Frame& frame) { wire(1).to_fabric += frame.bytes(); }
  TryReceive take(std::string& into, std::uint64_t tag = 0, const Fingerprint& call = {}) {
    return channel().try_receive(1, tag, writable(into), call);
  }
  /// The ordinary way.
  std::string receive(std::size_t bytes, std::uint64_t tag = 0) {
    std::string got(bytes, 'x');
    const TransferRef receive = channel().receive(1, tag, writable(got), {});
    settle();
    EXPECT_TRUE(receive->done() && receive->status().ok());
    return got;
  }
};

// spec: E1 a message that stands in memory is taken from there, in the order of its tag
TEST(ChannelAtOnce, WhatHasComeIsTakenInOrder) {
  MemoryJob job;
  std::string got(3, 'x'), none;
  EXPECT_EQ(job.take(got), TryReceive::not_yet);
  for (const char* each : {"one", "two", "tri"}) job.put(eager(each, 5));
  job.put(eager("", 5));
  for (const char* each : {"one", "two", "tri"}) {
    ASSERT_EQ(job.take(got, 5), TryReceive::received);
    EXPECT_EQ(got, each);
  }
  EXPECT_EQ(job.take(none, 5), TryReceive::received) << "of nothing, too";
  EXPECT_EQ(job.take(got, 5), TryReceive::not_yet);
  const std::string large = pattern(kEagerBytes, 3);
  std::string all(large.size(), 'x');
  job.put(eager(large));
  ASSERT_EQ(job.take(all), TryReceive::received);
  EXPECT_TRUE(all == large);
}

TEST(ChannelAtOnce, WhereverTheMemoryTurns) {
  const std::string payload = pattern(100, 1);
  for (std::size_t turn = 0; turn <= sizeof(FrameHeader) + payload.size() + 1; ++turn) {
    MemoryJob job;
    job.wire(1).turn = turn;
    job.put(eager(payload));
    job.put(eager("next"));
    std::string got(payload.size(), 'x');
    const TryReceive taken = job.take(got);
    if (turn == 0) {  // a ring has no such memory: where its end is reached all that is there
                      // stands in the first piece
      EXPECT_EQ(taken, TryReceive::not_yet);
      continue;
    }
    ASSERT_EQ(taken, TryReceive::received) << turn;
    EXPECT_TRUE(got == payload) << turn;
    job.wire(1).turn = SIZE_MAX;
    EXPECT_EQ(job.receive(4), "next") << turn;
  }
}

// spec: E4 E1 what does not fit, is something else, or has others before it goes the ordinary way,
// untouched
TEST(ChannelAtOnce, AnythingElseIsLeftAsItIs) {
  const Fingerprint whole = of(DType::int32);
  Fingerprint collective = whole;
  collective.sequence = 1;
  const auto left = [](const Frame& frame, std::uint64_t tag, const Fingerprint& call,
                       std::size_t bytes = 4) {
    MemoryJob job;
    job.put(frame);
    std::string got(bytes, 'x');
    EXPECT_EQ(job.take(got, tag, call), TryReceive::needs_transfer);
    EXPECT_EQ(got, std::string(bytes, 'x'));
    EXPECT_EQ(job.wire(1).to_fabric.size(), frame.bytes().size());
  };
  left(eager("four", 1, 0, whole), 2, whole);
  left(eager("four", 1, 0, whole), 1, of(DType::float32));
  left(eager("four", 1, 0, whole), 1, whole, 8);
  left(eager("four and more", 1, 0, whole), 1, whole);
  left(eager("four", 1, 7, whole), 1, whole);
  left(eager("four", 1, 0, collective), 1, collective);
  left(request(1, 1 << 20, 1, 0, whole), 1, whole, 1 << 20);
  Frame part = eager("four", 1, 0, whole);
  MemoryJob job;
  job.wire(1).to_fabric = part.bytes().substr(0, part.bytes().size() - 1);
  std::string got(4, 'x');
  EXPECT_EQ(job.take(got, 1, whole), TryReceive::needs_transfer) << "a part of it";
  job.settle();  // has begun to read it
  job.wire(1).to_fabric += part.payload.substr(3);
  EXPECT_EQ(job.take(got, 1, whole), TryReceive::needs_transfer) << "the rest of it";
}

TEST(ChannelAtOnce, WhoCameFirstIsFirst) {
  MemoryJob job(3);
  std::string got(1, 'x'), mine(1, 'x'), any(1, 'x');
  job.say(1, eager("a"));  // taken in, and not wanted yet
  job.put(eager("b"));
  EXPECT_EQ(job.take(got), TryReceive::needs_transfer);
  EXPECT_EQ(job.receive(1), "a");
  EXPECT_EQ(job.receive(1), "b");
  const TransferRef named = job.channel().receive(1, 0, writable(mine), {});
  job.put(eager("c"));
  EXPECT_EQ(job.take(got), TryReceive::needs_transfer) << "a receive waits for it";
  job.settle();
  EXPECT_EQ(mine, "c");
  const TransferRef first = job.channel().receive(kAnyMember, 0, writable(any), {});
  job.put(eager("d"));
  EXPECT_EQ(job.take(got), TryReceive::needs_transfer) << "one from anybody, too";
  EXPECT_EQ(job.take(got, 1), TryReceive::needs_transfer);
  job.settle();
  EXPECT_EQ(any, "d");
  EXPECT_EQ(got, "x");
}

TEST(ChannelAtOnce, ChannelsThatHaveFailedAndOutsidersGiveNothing) {
  MemoryJob job;
  std::string got(1, 'x');
  job.put(eager("a"));
  EXPECT_EQ(job.channel().try_receive(2, 0, writable(got), {}), TryReceive::needs_transfer);
  EXPECT_EQ(job.channel().try_receive(kAnyMember, 0, writable(got), {}),
            TryReceive::needs_transfer);
  EXPECT_EQ(job.channel().try_receive(0, 0, writable(got), {}), TryReceive::needs_transfer)
      << "oneself";
  job.channel().fail(Status(Code::aborted, "over"));
  EXPECT_EQ(job.take(got), TryReceive::needs_transfer);
}

TEST(ChannelAtOnce, CreditComesBackAsEver) {
  MemoryJob job;
  const std::string payload = pattern(kEagerBytes, 1);
  GivenCredit given;
  for (int i = 0; i < 200; ++i) {
    std::string got(payload.size(), 'x');
    job.put(eager(payload));
    ASSERT_EQ(job.take(got), TryReceive::received) << i;
    given.hear(job, 1);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(given.bytes, 200 * payload.size() - kEagerCredit / 4);
  EXPECT_EQ(given.envelopes * payload.size(), given.bytes);
  // A peer that has used all of its credit is noticed on the ordinary path.
  for (std::size_t i = 0; i < kEagerCredit / kEagerBytes; ++i) job.say(1, eager(payload, 9));
  job.put(eager(payload, 1));
  std::string got(payload.size(), 'x');
  EXPECT_EQ(job.take(got, 1), TryReceive::needs_transfer);
  job.settle();
  EXPECT_NE(job.fabric->death_of(1).message().find("credit"), std::string::npos);
}

TEST(ChannelAtOnce, WhatOthersSendIsLookedAtMeanwhile) {
  MemoryJob job(3);
  job.wire(2).in_memory = true;
  job.wire(2).to_fabric = eager("other").bytes();
  std::string got(3, 'x');
  int taken = 0;
  for (; !job.wire(2).to_fabric.empty() && taken < 1000; ++taken) {
    job.put(eager("mes"));
    if (job.take(got) == TryReceive::received) continue;
    const TransferRef posted = job.channel().receive(1, 0, writable(got), {});
    job.fabric->wait([&] { return posted->done(); }, job.clock.now());
    ASSERT_TRUE(posted->done());
  }
  EXPECT_GT(taken, 10);
  EXPECT_LT(taken, 1000) << "a rank that finds all its messages there never saw what another sent";
}

TEST(ChannelAtOnce, AFailureOnTheWayOutOfASendLeavesItWhole) {
  ScriptedJob job(3);
  job.wire(1);
  ScriptedWire& broken = job.wire(2);
  broken.room = 0;
  const TransferRef stuck = job.channel().send(2, 0, as_bytes("stuck"), {});
  Frame failure = frame_of(FrameKind::channel_failure);
  failure.payload = encode_cause(Status(Code::aborted, "over", {2}));
  broken.to_fabric += failure.bytes();
  broken.ended = true;  // the write fails, and what it had to say is read
  const TransferRef sent = job.channel().send(1, 0, as_bytes("gone"), {});
  ASSERT_NE(sent, nullptr);
  EXPECT_TRUE(sent->done());
  EXPECT_TRUE(job.channel().failed());
  EXPECT_EQ(stuck->status().code(), Code::aborted);
  const TransferRef late = job.channel().send(1, 0, as_bytes("late"), {});
  EXPECT_EQ(late->status().code(), Code::aborted);
}

// spec: E1 a send that is gone needs nothing more; one of which a part is gone has its place before
// all later ones
TEST(ChannelAtOnce, ASendIsATransferOnlyWhereItHasNotGone) {
  ScriptedJob job;
  ScriptedWire& wire = job.wire(1);
  EXPECT_EQ(job.channel().try_send_inline(1, 0, as_bytes("gone"), {}), nullptr);
  EXPECT_TRUE(job.channel().send(1, 0, as_bytes("too"), {})->done());
  wire.room = 10;
  const std::string last = "last";
  const TransferRef part = job.channel().try_send_inline(1, 0, as_bytes(last), {});
  ASSERT_NE(part, nullptr);
  EXPECT_FALSE(part->done());
  const TransferRef behind = job.channel().try_send_inline(1, 0, as_bytes("behind"), {});
  ASSERT_NE(behind, nullptr) << "it may not overtake";
  wire.room = SIZE_MAX;
  const auto frames = job.heard(1);
  ASSERT_EQ(frames.size(), 4u);
  EXPECT_EQ(frames[2].payload, "last");
  EXPECT_EQ(frames[3].payload, "behind");
  EXPECT_TRUE(part->done() && behind->done());
  const TransferRef nobody = job.channel().try_send_inline(5, 0, as_bytes("x"), {});
  ASSERT_NE(nobody, nullptr);
  EXPECT_EQ(nobody->status().code(), Code::invalid_argument);
}

}  // namespace
}  // namespace muster::transport
