// SPDX-License-Identifier: BSD-3-Clause
// How much a channel may send, what taking back does, and how channels begin and end: one real
// fabric against peers that the test plays frame by frame.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "core/transport/channel/channel.h"
#include "core/transport/channel/channel_table.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"

namespace muster::transport {
namespace {

// ---- credit

TEST(ChannelCredit, SmallMessagesAskOnceTheCreditIsSpent) {
  ScriptedJob job;
  job.wire(1);
  const std::string payload = pattern(kEagerBytes, 1);
  std::vector<TransferRef> sends;
  for (int i = 0; i < 20; ++i) sends.push_back(job.channel().send(1, 0, as_bytes(payload), {}));
  const auto frames = job.heard(1);
  ASSERT_EQ(frames.size(), 20u);
  for (std::size_t i = 0; i < 20; ++i) {
    const bool within = i < kEagerCredit / kEagerBytes;
    EXPECT_EQ(frames[i].header.kind, within ? FrameKind::eager : FrameKind::request) << i;
    EXPECT_EQ(sends[i]->done(), within) << i;
  }
  Frame credit = frame_of(FrameKind::credit);
  credit.header.amount = kEagerCredit;
  credit.header.tag = kEagerCredit / kEagerBytes;
  job.say(1, credit);
  job.channel().send(1, 0, as_bytes(payload), {});
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::eager}));
}

TEST(ChannelCredit, EnvelopesRunOutAndBlockThisChannelAlone) {
  ScriptedJob job;
  job.wire(1);
  auto other = job.fabric->open(1, {0, 1});
  ASSERT_TRUE(other.ok());
  std::vector<TransferRef> sends;
  for (std::uint32_t i = 0; i < kEnvelopeCredit + 10; ++i)
    sends.push_back(job.channel().send(1, i, as_bytes("x"), {}));
  EXPECT_EQ(job.heard(1).size(), kEnvelopeCredit);
  EXPECT_FALSE(sends.back()->done());
  EXPECT_TRUE((*other)->send(1, 0, as_bytes("y"), {})->done());
  EXPECT_EQ(job.heard(1).size(), 1u);
  Frame credit = frame_of(FrameKind::credit);
  credit.header.tag = 4;
  credit.header.amount = 4;
  job.say(1, credit);
  const auto released = job.heard(1);
  ASSERT_EQ(released.size(), 4u);
  EXPECT_EQ(released[0].header.tag, kEnvelopeCredit) << "in the order in which they were posted";
  job.channel().cancel(sends[kEnvelopeCredit + 4]);
  job.say(1, credit);
  EXPECT_EQ(job.heard(1).at(0).header.tag, kEnvelopeCredit + 5);
}

TEST(ChannelCredit, AReceiverGivesBackWhatItHasTaken) {
  ScriptedJob job;
  const std::string payload = pattern(kEagerBytes, 1);
  GivenCredit given;
  for (int i = 0; i < 200; ++i) {
    std::string got(payload.size(), 'x');
    TransferRef receive;
    if (i % 2 == 0) receive = job.channel().receive(1, 0, writable(got), {});
    job.say(1, eager(payload));
    if (i % 2 == 1) receive = job.channel().receive(1, 0, writable(got), {});
    ASSERT_TRUE(receive->done() && receive->status().ok()) << i << receive->status().message();
    given.hear(job, 1);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(given.bytes, 200 * payload.size() - kEagerCredit / 4);
  EXPECT_LE(given.bytes, 200 * payload.size());
  EXPECT_EQ(given.envelopes * payload.size(), given.bytes);
}

TEST(ChannelCredit, WhoIgnoresItsCreditIsCutOff) {
  ScriptedJob eager_job;
  for (std::size_t i = 0; i <= kEagerCredit / kEagerBytes; ++i) {
    EXPECT_TRUE(eager_job.fabric->death_of(1).ok()) << i;
    eager_job.say(1, eager(std::string(kEagerBytes, 'f'), i));
  }
  EXPECT_NE(eager_job.fabric->death_of(1).message().find("credit"), std::string::npos);
  ScriptedJob envelopes;
  for (std::uint32_t i = 0; i <= kEnvelopeCredit; ++i) {
    EXPECT_TRUE(envelopes.fabric->death_of(1).ok()) << i;
    envelopes.say(1, request(i + 1, 1 << 20, i));
  }
  EXPECT_FALSE(envelopes.fabric->death_of(1).ok());
  ScriptedJob channels;
  for (std::uint32_t i = 1; channels.fabric->death_of(1).ok(); ++i) {
    ASSERT_LT(i, 100'000u) << "a peer may name channels without end";
    channels.say(1, eager("x", 0, i));
  }
}

TEST(ChannelCredit, DroppedMessagesGiveTheirCreditBack) {
  ScriptedJob job;
  std::string four(4, 'x');
  for (int i = 0; i < 5000; ++i) {
    // Misfits, cancelled receives under way and withdrawn requests in turn.
    const TransferRef receive = job.channel().receive(1, 0, writable(four), {});
    if (i % 3 == 0) {
      job.say(1, eager("too long", 0));
    } else if (i % 3 == 1) {
      const std::string bytes = eager("four", 0).bytes();
      job.wire(1).to_fabric = bytes.substr(0, bytes.size() - 1);
      job.settle();
      job.channel().cancel(receive);
      EXPECT_TRUE(receive->done());
      job.wire(1).to_fabric += bytes.substr(bytes.size() - 1);
      job.settle();
    } else {
      job.channel().cancel(receive);
      job.say(1, request(static_cast<std::uint64_t>(i), 100'000, 9));
      Frame withdraw = frame_of(FrameKind::withdraw);
      withdraw.header.message = static_cast<std::uint64_t>(i);
      job.say(1, withdraw);
    }
    ASSERT_TRUE(job.fabric->death_of(1).ok()) << i << job.fabric->death_of(1).message();
  }
}

// ---- taking back

TEST(ChannelCancel, AReceiveThatHasBegunDrains) {
  ScriptedJob job;
  std::string big(50'000, 'x'), next(4, 'x');
  const TransferRef receive = job.channel().receive(1, 1, writable(big), {});
  job.say(1, request(1, 50'000, 1));
  job.say(1, fragment(1, 0, std::string(10'000, 'y')));
  job.channel().cancel(receive);
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::aborted);
  big.assign(50'000, 'z');
  job.say(1, fragment(1, 10'000, std::string(40'000, 'y')));
  EXPECT_EQ(big, std::string(50'000, 'z'));
  job.say(1, eager("next", 1));
  EXPECT_TRUE(job.channel().receive(1, 1, writable(next), {})->done());
  EXPECT_EQ(next, "next");
  job.channel().cancel(receive);  // a second time does nothing
}

TEST(ChannelCancel, ASendThatHasBegunIsTakenBack) {
  ScriptedJob job;
  ScriptedWire& wire = job.wire(1);
  std::string large = pattern(600'000, 1);
  TransferRef send = job.channel().send(1, 1, as_bytes(large), {});
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::request}));
  wire.room = 1000;
  Frame clear = frame_of(FrameKind::clear);
  clear.header.message = 1;
  job.say(1, clear);
  job.channel().cancel(send);
  EXPECT_TRUE(send->done());
  const std::string original = large;
  large.assign(large.size(), 'z');
  wire.room = SIZE_MAX;
  const auto frames = job.heard(1);
  EXPECT_EQ(kinds(frames), (std::vector{FrameKind::data, FrameKind::withdraw}));
  EXPECT_TRUE(frames.at(0).payload == original.substr(0, kFragmentBytes))
      << "the fragment that had begun ends from a copy";

  // Before it was asked for: the other side may be asking at the same time.
  send = job.channel().send(1, 1, as_bytes(large), {});
  job.heard(1);
  job.channel().cancel(send);
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::withdraw}));
  clear.header.message = 2;
  job.say(1, clear);
  EXPECT_TRUE(job.heard(1).empty());
  EXPECT_TRUE(job.fabric->death_of(1).ok());
}

TEST(ChannelCancel, AReceiveWhoseMessageIsTakenBackSaysSo) {
  ScriptedJob job;
  std::string big(50'000, 'x');
  const TransferRef receive = job.channel().receive(1, 1, writable(big), {});
  job.say(1, request(1, 50'000, 1));
  job.say(1, fragment(1, 0, "begun"));
  Frame withdraw = frame_of(FrameKind::withdraw);
  withdraw.header.message = 1;
  job.say(1, withdraw);
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::aborted);
  EXPECT_EQ(receive->status().ranks(), std::vector<int>{1});
}

// ---- opening and closing

TEST(ChannelLife, MessagesWaitForTheirChannel) {
  ScriptedJob job(3);
  job.say(1, eager("early", 4, 7));
  job.say(1, request(1, 100'000, 5, 7));
  job.say(2, eager("stray", 4, 7));
  auto channel = job.fabric->open(7, {1, 0});
  ASSERT_TRUE(channel.ok());
  EXPECT_EQ((*channel)->rank(), 1);
  std::string small(5, 'x'), big(100'000, 'x');
  const TransferRef receive = (*channel)->receive(kAnyMember, 4, writable(small), {});
  EXPECT_TRUE(receive->done());
  EXPECT_EQ(receive->source(), 0) << "positions are the group's";
  EXPECT_EQ(small, "early");
  (*channel)->receive(0, 5, writable(big), {});
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::clear}));
}

TEST(ChannelLife, IdsAreUsedOnceAndOutOfOrder) {
  ScriptedJob job(3);
  EXPECT_EQ(job.fabric->open(0, {0, 1}).status().code(), Code::invalid_argument);
  EXPECT_EQ(job.fabric->open(1, {1, 2}).status().code(), Code::invalid_argument) << "not a member";
  EXPECT_EQ(job.fabric->open(1, {0, 3}).status().code(), Code::invalid_argument) << "no such rank";
  EXPECT_EQ(job.fabric->open(1, {0, 0}).status().code(), Code::invalid_argument) << "twice";
  for (const std::uint32_t id : {5u, 3u, 4u, 1u, 2u, 9u})
    EXPECT_TRUE(job.fabric->open(id, {0, 1}).ok()) << id;
  for (const std::uint32_t id : {0u, 1u, 2u, 3u, 4u, 5u, 9u})
    EXPECT_EQ(job.fabric->open(id, {0, 1}).status().code(), Code::invalid_argument) << id;
  EXPECT_TRUE(job.fabric->open(8, {0, 1}).ok());
}

// Ranks that make groups at the same time need not agree on ids: what one gives out, no other does.
TEST(ChannelLife, EveryRankGivesOutIdsOfItsOwn) {
  LoopbackJob job(3, false);
  std::mutex lock;
  std::set<std::uint32_t> given;
  job.run([&](Fabric& fabric) {
    const std::uint32_t first = fabric.next_channel_id();
    EXPECT_TRUE(fabric.open(first + 1, {fabric.rank()}).ok());
    const std::uint32_t second = fabric.next_channel_id();
    EXPECT_EQ(second, first + 2) << "after the one that is used";
    const std::lock_guard guard(lock);
    EXPECT_TRUE(given.insert(first).second) << first;
    EXPECT_TRUE(given.insert(second).second) << second;
    EXPECT_NE(first, 0u);
  });
  EXPECT_EQ(given.size(), 6u);
}

TEST(ChannelLife, AClosedChannelDropsWhatStillComes) {
  ScriptedJob job;
  auto channel = job.fabric->open(1, {0, 1});
  ASSERT_TRUE(channel.ok());
  std::string small(5, 'x');
  const TransferRef receive = (*channel)->receive(1, 0, writable(small), {});
  // Its end comes in the middle of a message.
  const std::string bytes = eager("small", 0, 1).bytes();
  job.wire(1).to_fabric = bytes.substr(0, bytes.size() - 2);
  job.settle();
  channel->reset();
  EXPECT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::aborted);
  job.wire(1).to_fabric = bytes.substr(bytes.size() - 2);
  job.settle();
  job.say(1, eager("late", 0, 1));
  job.say(1, request(1, 100'000, 0, 1));
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::refuse}));
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  std::string got(2, 'x');
  job.say(1, eager("ok", 0));
  EXPECT_TRUE(job.channel().receive(1, 0, writable(got), {})->done());
}

TEST(ChannelLife, AChannelMayOutliveItsFabric) {
  ScriptedJob job;
  auto channel = job.fabric->open(1, {0, 1});
  std::string small(5, 'x');
  const TransferRef receive = (*channel)->receive(1, 0, writable(small), {});
  job.fabric.reset();
  EXPECT_TRUE(receive->done());
  EXPECT_EQ((*channel)->failure().code(), Code::aborted);
  EXPECT_TRUE((*channel)->send(1, 0, as_bytes("x"), {})->done());
  channel->reset();
}

}  // namespace
}  // namespace muster::transport
