// SPDX-License-Identifier: BSD-3-Clause
// Deaths, blame and how the news spreads: one fabric against scripted peers on a hand-moved clock.
#include <gtest/gtest.h>

#include <set>

#include "core/transport/failure/failure_detector.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Frame rank_failure(int rank, const Status& cause) {
  Frame frame = frame_of(FrameKind::rank_failure);
  frame.header.message = static_cast<std::uint64_t>(rank);
  frame.payload = encode_cause(cause);
  return frame;
}
Frame channel_failure(const Status& cause, std::uint32_t channel = 0) {
  Frame frame = frame_of(FrameKind::channel_failure, channel);
  frame.payload = encode_cause(cause);
  return frame;
}
Status killed(int rank) {
  return Status(Code::peer_failed, "rank " + std::to_string(rank) + " was killed", {rank});
}

std::size_t count(const std::vector<Frame>& frames, FrameKind kind) {
  return static_cast<std::size_t>(std::count_if(
      frames.begin(), frames.end(), [kind](const Frame& f) { return f.header.kind == kind; }));
}

// ---- the end of a stream

TEST(StreamEnd, IsHeldForACauseThenBlamedOnThePeer) {
  ScriptedJob job(3);
  std::string got(1, 'x');
  const TransferRef receive = job.channel().receive(1, 0, writable(got), {});
  job.wire(1);
  job.end(1);
  job.advance(milliseconds(19));
  EXPECT_FALSE(receive->done());
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  job.advance(milliseconds(1));
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::peer_failed);
  EXPECT_EQ(receive->status().ranks(), std::vector<int>{1});
  EXPECT_NE(receive->status().message().find("ended without a close message"), std::string::npos)
      << receive->status().message();
}

TEST(StreamEnd, NobodyBlamesTheFirstToGiveUp) {
  // Rank 1 gives up because rank 2 died. Whatever comes first, its word, its end or the news from
  // another rank, rank 2 is named.
  const std::vector<std::function<void(ScriptedJob&)>> orders = {
      [](ScriptedJob& job) {
        job.wire(1).to_fabric = rank_failure(2, killed(2)).bytes();
        job.end(1);
      },
      [](ScriptedJob& job) {
        job.wire(1).to_fabric = channel_failure(killed(2)).bytes();
        job.end(1);
      },
      [](ScriptedJob& job) {
        job.end(1);
        job.advance(milliseconds(15));
        job.say(3, rank_failure(2, killed(2)));
      },
      [](ScriptedJob& job) {
        job.end(1);
        job.end(2);
        job.advance(milliseconds(10));
        job.say(3, rank_failure(2, killed(2)));
      },
  };
  for (std::size_t i = 0; i < orders.size(); ++i) {
    ScriptedJob job(4);
    for (const int peer : {1, 2, 3}) job.wire(peer);
    auto pair = job.fabric->open(1, {0, 1});
    std::string got(1, 'x'), paired(1, 'x');
    const TransferRef receive = job.channel().receive(1, 0, writable(got), {});
    const TransferRef in_pair = (*pair)->receive(1, 0, writable(paired), {});
    orders[i](job);
    job.advance(milliseconds(100));
    ASSERT_TRUE(receive->done() && in_pair->done()) << i;
    EXPECT_EQ(receive->status().ranks(), std::vector<int>{2}) << i << receive->status().message();
    // A group that the dead rank was no member of fails because its peer gave up, and names who was
    // the cause.
    EXPECT_EQ(in_pair->status().ranks(), std::vector<int>{2}) << i << in_pair->status().message();
  }
}

TEST(StreamEnd, AnOldFailureExplainsNoNewDeath) {
  ScriptedJob job(4);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  auto survivors = job.fabric->open(1, {0, 1, 3});
  job.say(1, rank_failure(2, killed(2)));
  job.advance(milliseconds(200));
  // Rank 1 goes on working after rank 2's death, then dies by itself.
  job.say(1, eager("still here", 0, 1));
  job.end(1);
  job.advance(milliseconds(30));
  EXPECT_EQ((*survivors)->failure().ranks(), std::vector<int>{1})
      << (*survivors)->failure().message();
}

TEST(StreamEnd, AGoodbyeIsNoDeath) {
  ScriptedJob job(3);
  std::string got(1, 'x'), other(1, 'x'), any(1, 'x');
  const TransferRef from_1 = job.channel().receive(1, 0, writable(got), {});
  const TransferRef from_2 = job.channel().receive(2, 0, writable(other), {});
  const TransferRef from_any = job.channel().receive(kAnyMember, 9, writable(any), {});
  job.wire(2);
  job.say(1, eager("late", 3));
  job.say(1, frame_of(FrameKind::close));
  EXPECT_EQ(count(job.heard(1), FrameKind::close_ack), 1u);
  job.end(1);
  job.advance(seconds(1));
  ASSERT_TRUE(from_1->done());
  EXPECT_EQ(from_1->status().code(), Code::closed);
  EXPECT_EQ(from_1->status().ranks(), std::vector<int>{1});
  EXPECT_FALSE(from_2->done());
  EXPECT_FALSE(job.channel().failed());
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  EXPECT_EQ(job.channel().send(1, 0, as_bytes("x"), {})->status().code(), Code::closed);
  std::string late(4, 'x');
  EXPECT_TRUE(job.channel().receive(1, 3, writable(late), {})->status().ok())
      << "what it sent before it left is still there";
  EXPECT_FALSE(from_any->done());
  job.say(2, frame_of(FrameKind::close));
  EXPECT_TRUE(from_any->done()) << "nobody is left to send to it";
}

TEST(StreamEnd, WhatALeaverHadAnnouncedWillNeverCome) {
  ScriptedJob job(3);
  job.wire(2);
  std::string matched(50'000, 'x'), later(50'000, 'x');
  const TransferRef from_any = job.channel().receive(kAnyMember, 1, writable(matched), {});
  job.say(1, request(1, 50'000, 1));
  job.say(1, request(2, 50'000, 2));
  job.say(1, fragment(1, 0, "begun"));
  job.say(1, frame_of(FrameKind::close));
  ASSERT_TRUE(from_any->done());
  EXPECT_EQ(from_any->status().code(), Code::closed);
  const TransferRef receive = job.channel().receive(1, 2, writable(later), {});
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::closed);
}

TEST(StreamEnd, SaysGoodbyeToAll) {
  ScriptedJob job(3);
  job.wire(1);
  job.wire(2);
  const auto one = job.wires[1];
  const auto two = job.wires[2];
  job.fabric.reset();
  for (const auto& wire : {one, two}) {
    EXPECT_EQ(count(take_frames(wire->from_fabric), FrameKind::close), 1u);
    EXPECT_TRUE(wire->closed);
  }
  EXPECT_NE(job.net->mailbox.aborted.load(), 0u);
}

// A rank that fails tells why, and sends no close frame: its reason is spread like the news of a
// death.
TEST(OwnFailure, IsToldToAllWithItsReason) {
  ScriptedJob job(3);
  job.wire(1);
  job.wire(2);
  const auto one = job.wires[1];
  const auto two = job.wires[2];
  std::string got(1, 'x');
  const TransferRef receive = job.channel().receive(1, 0, writable(got), {});
  job.fabric->fail_rank("ValueError: bad batch", {});
  EXPECT_EQ(receive->status().message(), "rank 0 failed: ValueError: bad batch");
  job.fabric->fail_rank("again", {});
  job.fabric.reset();
  for (const auto& wire : {one, two}) {
    const auto frames = take_frames(wire->from_fabric);
    EXPECT_EQ(count(frames, FrameKind::rank_failure), 1u);
    EXPECT_EQ(count(frames, FrameKind::close), 0u);
    for (const Frame& frame : frames) {
      if (frame.header.kind != FrameKind::rank_failure) continue;
      EXPECT_EQ(frame.header.message, 0u);
      const auto cause = decode_cause(frame.payload, 3);
      ASSERT_TRUE(cause.has_value());
      EXPECT_EQ(cause->message(), "rank 0 failed: ValueError: bad batch");
      EXPECT_EQ(cause->ranks(), std::vector<int>{0});
    }
  }
  EXPECT_EQ(job.net->mailbox.aborted.load(), 0u);
  EXPECT_NE(job.net->mailbox.troubled.load(), 0u)
      << "it ends because of what is on its way to the others";
}

TEST(OwnFailure, OfAPeerFailsAllChannelsAndIsPassedOn) {
  ScriptedJob job(3);
  job.wire(2);
  std::string needs(1, 'x'), got(1, 'x'), comes(1, 'x');
  const TransferRef from_one = job.channel().receive(1, 0, writable(needs), {});
  const TransferRef receive = job.channel().receive(2, 0, writable(got), {});
  const TransferRef in_time = job.channel().receive(2, 1, writable(comes), {});
  job.wire(1);
  Frame failed =
      rank_failure(1, Status(Code::peer_failed, "rank 1 failed: ValueError: bad batch", {1}));
  failed.header.amount = 1;
  job.say(1, failed);
  ASSERT_TRUE(from_one->done()) << "what needs that rank ends at once";
  EXPECT_EQ(from_one->status().message(), "rank 1 failed: ValueError: bad batch");
  EXPECT_FALSE(job.channel().failed());
  job.say(2, eager("y", 1));
  EXPECT_TRUE(in_time->done() && in_time->status().ok())
      << "a call for which it had come still ends well";
  job.advance(milliseconds(50));
  ASSERT_TRUE(receive->done()) << "what does not need that rank ends too";
  EXPECT_EQ(receive->status().message(), "rank 1 failed: ValueError: bad batch");
  EXPECT_EQ(job.fabric->death_of(1).message(), "rank 1 failed: ValueError: bad batch");
  EXPECT_EQ(count(take_frames(job.wires[2]->from_fabric), FrameKind::rank_failure), 1u);
}

TEST(OwnFailure, AfterAnothersIsThatOnes) {
  ScriptedJob job(3);
  job.wire(1);
  job.wire(2);
  job.say(1, rank_failure(2, killed(2)));
  const auto one = job.wires[1];
  take_frames(one->from_fabric);
  job.fabric->fail_rank("RuntimeError: all_reduce failed", {});
  const auto frames = take_frames(one->from_fabric);
  ASSERT_EQ(count(frames, FrameKind::rank_failure), 1u);
  const auto cause = decode_cause(frames.back().payload, 3);
  ASSERT_TRUE(cause.has_value());
  EXPECT_EQ(cause->message(), "rank 0 gave up after an earlier failure: rank 2 was killed");
  EXPECT_EQ(cause->ranks(), std::vector<int>{2});
}

TEST(StreamEnd, ThatWasNotClosedIsToldSo) {
  ScriptedJob job(3);
  std::string got(1, 'x'), other(1, 'x');
  const TransferRef receive = job.channel().receive(1, 0, writable(got), {});
  const TransferRef from_two = job.channel().receive(2, 0, writable(other), {});
  job.wire(1);
  Frame close = frame_of(FrameKind::close);
  close.header.amount = 1;
  job.say(1, close);
  ASSERT_TRUE(receive->done());
  EXPECT_NE(receive->status().message().find(
                "rank 1's process has ended, and called no destroy_process_group"),
            std::string::npos)
      << receive->status().message();
  EXPECT_FALSE(from_two->done());
  EXPECT_FALSE(job.channel().failed());
  EXPECT_TRUE(job.channel().someone_left());
  EXPECT_EQ(job.fabric->gone(1).code(), Code::closed);
}

TEST(StreamEnd, SaysThatItWasNotClosed) {
  ScriptedJob job(2);
  job.wire(1);
  const auto one = job.wires[1];
  job.fabric->leave_unclosed();
  job.fabric.reset();
  const auto frames = take_frames(one->from_fabric);
  ASSERT_EQ(count(frames, FrameKind::close), 1u);
  EXPECT_EQ(frames.back().header.amount, 1u);
  EXPECT_EQ(job.net->mailbox.aborted.load(), shm::Mailbox::kUnclosed);
}

TEST(StreamEnd, OfANeighbourThatHasLeftUnseenDisturbsNobody) {
  // Ranks 3 and 2 leave at once: 3 tells its neighbours 2 and 0, 2 tells 1 and 3. Rank 3, which
  // rank 1 watches next, is not there.
  ScriptedJob job(4, 1);
  std::string got(1, 'x');
  const TransferRef receive = job.channel().receive(0, 0, writable(got), {});
  job.say(2, frame_of(FrameKind::close));
  job.advance(milliseconds(300));
  ASSERT_EQ(job.net->connects[3], 1);
  job.net->news.push_back([](ConnectorEvents& events) {
    events.on_connect_failed(3, Status(Code::network, "connection refused"));
  });
  job.settle();
  job.advance(milliseconds(100));
  EXPECT_FALSE(job.channel().failed()) << job.channel().failure().message();
  EXPECT_FALSE(receive->done());
  // Only who needs it learns that it is gone.
  const TransferRef send = job.channel().send(3, 0, as_bytes("x"), {});
  job.advance(milliseconds(25));
  ASSERT_TRUE(send->done());
  EXPECT_EQ(send->status().ranks(), std::vector<int>{3}) << send->status().message();
}

// ---- proof of a death

TEST(Death, FailsEveryChannelOfThatRankAndNoOther) {
  ScriptedJob job(4);
  auto with = job.fabric->open(1, {0, 2});
  auto without = job.fabric->open(2, {0, 1, 3});
  for (const int peer : {1, 2, 3}) job.wire(peer);
  job.net->news.push_back([](ConnectorEvents& events) { events.on_death(2, killed(2)); });
  job.settle();
  EXPECT_EQ((*with)->failure().ranks(), std::vector<int>{2});
  EXPECT_EQ(job.channel().failure().message(), "rank 2 was killed");
  EXPECT_FALSE((*without)->failed());
  EXPECT_TRUE((*without)->send(1, 0, as_bytes("x"), {})->done());
  auto later = job.fabric->open(3, {0, 1, 2});
  EXPECT_EQ((*later)->failure().ranks(), std::vector<int>{2})
      << "a group with a dead member has failed from the start";
  for (const int peer : {1, 3}) {
    const auto frames = job.heard(peer);
    EXPECT_EQ(count(frames, FrameKind::rank_failure), 1u);
    EXPECT_EQ(
        frames.back().header.kind == FrameKind::rank_failure ? frames.back().header.message : 2u,
        2u);
  }
  // Once per culprit.
  job.say(1, rank_failure(2, killed(2)));
  job.fabric->declare_dead(2, Status(Code::peer_failed, "again", {2}));
  EXPECT_EQ(count(job.heard(3), FrameKind::rank_failure), 0u);
  EXPECT_EQ(job.fabric->death_of(2).message(), "rank 2 was killed");
}

TEST(Death, LastWordsAreReadFirst) {
  ScriptedJob job(4);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  std::string got(4, 'x');
  const TransferRef receive = job.channel().receive(1, 0, writable(got), {});
  job.wires[1]->to_fabric = eager("last").bytes() + rank_failure(2, killed(2)).bytes();
  job.net->news.push_back([](ConnectorEvents& events) { events.on_death(1, killed(1)); });
  job.settle();
  EXPECT_TRUE(receive->status().ok());
  EXPECT_EQ(job.channel().failure().ranks(), std::vector<int>{2})
      << job.channel().failure().message();
}

TEST(Death, OfARankThatNobodyNeedsIsJudgedWhenItIsNeeded) {
  // Without a link and without shared memory an end in good order looks the same: only who needs
  // the rank may call it a death.
  ScriptedJob job(3, 0, nullptr, {0, 0, 0});
  job.net->news.push_back([](ConnectorEvents& events) { events.on_death(2, killed(2)); });
  job.advance(seconds(1));
  EXPECT_FALSE(job.channel().failed());
  std::string got(1, 'x');
  const TransferRef receive = job.channel().receive(2, 0, writable(got), {});
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().ranks(), std::vector<int>{2});

  ScriptedJob waiting(3, 0, nullptr, {0, 0, 0});
  const TransferRef posted = waiting.channel().receive(2, 0, writable(got), {});
  waiting.net->news.push_back([](ConnectorEvents& events) { events.on_death(2, killed(2)); });
  waiting.settle();
  waiting.advance(milliseconds(20));
  ASSERT_TRUE(posted->done());
  EXPECT_EQ(posted->status().ranks(), std::vector<int>{2});
}

TEST(Death, AReceiveHalfDoneEndsWithTheCause) {
  ScriptedJob job(3);
  std::string big(50'000, 'x'), small(1000, 'x');
  const TransferRef large = job.channel().receive(1, 1, writable(big), {});
  const TransferRef eager_one = job.channel().receive(2, 2, writable(small), {});
  job.say(1, request(1, 50'000, 1));
  job.say(1, fragment(1, 0, std::string(10'000, 'y')));
  job.wire(2).to_fabric = eager(std::string(1000, 'e'), 2).bytes().substr(0, 500);
  job.settle();
  job.channel().fail(Status(Code::timed_out, "enough", {1}));
  EXPECT_EQ(large->status().message(), "enough");
  EXPECT_EQ(eager_one->status().message(), "enough");
  // The rest comes nevertheless, goes nowhere, and the links stay usable.
  big.assign(50'000, 'z');
  small.assign(1000, 'z');
  auto next = job.fabric->open(1, {0, 1, 2});
  job.say(1, fragment(1, 10'000, std::string(40'000, 'y')));
  job.wire(2).to_fabric +=
      eager(std::string(1000, 'e'), 2).bytes().substr(500) + eager("ok", 0, 1).bytes();
  job.say(1, eager("ok", 0, 1));
  EXPECT_EQ(big, std::string(50'000, 'z'));
  EXPECT_EQ(small, std::string(1000, 'z'));
  for (const int peer : {1, 2}) {
    std::string got(2, 'x');
    EXPECT_TRUE((*next)->receive(peer, 0, writable(got), {})->done());
    EXPECT_EQ(got, "ok");
  }
}

TEST(Death, ASendHalfWrittenEndsFromACopy) {
  ScriptedJob job(2);
  ScriptedWire& wire = job.wire(1);
  std::string data = pattern(10'000, 1);
  wire.room = 100;
  const TransferRef send = job.channel().send(1, 0, as_bytes(data), {});
  EXPECT_FALSE(send->done());
  job.channel().fail(Status(Code::aborted, "enough"));
  EXPECT_TRUE(send->done());
  data.assign(data.size(), 'z');
  wire.room = SIZE_MAX;
  const auto frames = job.heard(1);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_TRUE(frames[0].payload == pattern(10'000, 1));
  EXPECT_EQ(frames[1].header.kind, FrameKind::channel_failure);
}

TEST(Death, OfThisRankInTheEyesOfTheOthers) {
  ScriptedJob job(3);
  job.say(1, rank_failure(0, Status(Code::peer_failed, "rank 0 has not answered for 2.5 s", {0})));
  EXPECT_EQ(job.channel().failure().ranks(), std::vector<int>{0});
  EXPECT_NE(job.channel().failure().message().find("given this rank (0) up"), std::string::npos)
      << job.channel().failure().message();
}

// A rank tells what had gone wrong in it, and a peer passes that on to it as to all others.
TEST(Death, TheTroubleOfThisRankPassedBackToItFailsNothing) {
  ScriptedJob job(3);
  Frame trouble = rank_failure(0, Status(Code::closed, "ValueError: in its thread loader", {0}));
  trouble.header.amount = static_cast<std::uint64_t>(RankNews::trouble);
  job.say(1, trouble);
  EXPECT_TRUE(job.channel().failure().ok()) << job.channel().failure().message();
}

TEST(Death, APeerThatCannotBeReachedFailsWhoNeedsIt) {
  ScriptedJob job(4, 0, nullptr, {0, 1, 2, 3});
  const TransferRef send = job.channel().send(2, 0, as_bytes("x"), {});
  EXPECT_EQ(job.net->connects[2], 1);
  job.net->news.push_back([](ConnectorEvents& events) {
    events.on_connect_failed(2, Status(Code::network, "connection refused"));
  });
  job.settle();
  job.advance(milliseconds(25));
  ASSERT_TRUE(send->done());
  EXPECT_EQ(send->status().ranks(), std::vector<int>{2});
  EXPECT_NE(send->status().message().find("rank 0 cannot reach rank 2: connection refused"),
            std::string::npos)
      << send->status().message();
  // A wrong secret is nobody's death.
  ScriptedJob other(4);
  const TransferRef refused = other.channel().send(2, 0, as_bytes("x"), {});
  other.net->news.push_back([](ConnectorEvents& events) {
    events.on_connect_failed(2, Status(Code::refused, "another secret"));
  });
  other.settle();
  EXPECT_EQ(refused->status().code(), Code::refused);
  EXPECT_TRUE(other.fabric->death_of(2).ok());
}

TEST(News, GoOverStandingLinksAndOpenFewNewOnes) {
  ScriptedJob job(64);
  job.wire(33);
  job.net->connects.clear();
  job.channel().fail(Status(Code::timed_out, "rank 5 is missing", {5}));
  job.settle();
  EXPECT_EQ(count(job.heard(33), FrameKind::channel_failure), 1u);
  for (const int finger : {2, 4, 8, 16, 32}) {
    EXPECT_EQ(job.net->connects[finger], 1) << finger;
    EXPECT_EQ(count(job.heard(finger), FrameKind::channel_failure), 1u) << finger;
  }
  EXPECT_LE(job.net->connects.size(), 6u);
}

TEST(News, OfAChannelArePassedOnButNotBack) {
  ScriptedJob job(4);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  job.say(2, channel_failure(Status(Code::mismatch, "two calls", {1, 3})));
  EXPECT_EQ(job.channel().failure().message(), "two calls");
  EXPECT_EQ(count(job.heard(2), FrameKind::channel_failure), 0u);
  EXPECT_EQ(count(job.heard(1), FrameKind::channel_failure), 1u);
  EXPECT_EQ(count(job.heard(3), FrameKind::channel_failure), 1u);
  job.say(1, channel_failure(Status(Code::mismatch, "another", {1})));
  EXPECT_EQ(count(job.heard(3), FrameKind::channel_failure), 0u);
}

TEST(News, ComeBeforeTheGoodbyeOnAStreamThatStandsOnlyLater) {
  ScriptedJob job(6);
  auto pair = job.fabric->open(1, {0, 5});
  (*pair)->fail(Status(Code::timed_out, "rank 5 is late", {5}));
  job.net->news.push_back([](ConnectorEvents& events) { events.on_death(3, killed(3)); });
  job.channel().send(3, 0, as_bytes("x"), {});  // so that the death matters
  job.settle();
  job.advance(milliseconds(25));
  const auto kinds = [&](int peer) {
    std::vector<FrameKind> kinds;
    for (const Frame& frame : job.heard(peer)) kinds.push_back(frame.header.kind);
    return kinds;
  };
  // Rank 5 has asked for its stream when the failures had been told already.
  EXPECT_EQ(kinds(5),
            (std::vector<FrameKind>{FrameKind::channel_failure, FrameKind::rank_failure}));
  const auto late = std::make_shared<ScriptedWire>();
  job.net->connects.clear();
  job.net->news.push_back([late](ConnectorEvents& events) {
    events.on_stream(4, std::make_unique<ScriptedStream>(late));
  });
  job.settle();
  job.fabric.reset();
  const auto frames = take_frames(late->from_fabric);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].header.kind, FrameKind::rank_failure);
  EXPECT_EQ(frames[0].header.message, 3u);
  EXPECT_EQ(frames[1].header.kind, FrameKind::close);
}

TEST(News, ReachAChannelBeforeItIsOpened) {
  ScriptedJob job(3);
  job.say(1, channel_failure(Status(Code::timed_out, "rank 2 never came", {2}), 4));
  auto channel = job.fabric->open(4, {0, 1, 2});
  EXPECT_EQ((*channel)->failure().message(), "rank 2 never came");
}

// A rank that hears of a failure before it has opened the channel does not know yet which other
// ranks that concerns.
TEST(News, OfAChannelThatIsOpenedLaterArePassedOnThen) {
  ScriptedJob job(4);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  job.say(1, channel_failure(Status(Code::timed_out, "rank 3 never came", {3}), 4));
  job.settle();
  EXPECT_EQ(count(job.heard(2), FrameKind::channel_failure), 0u);
  auto channel = job.fabric->open(4, {0, 1, 2});
  job.settle();
  EXPECT_EQ(count(job.heard(2), FrameKind::channel_failure), 1u);
  EXPECT_EQ(count(job.heard(3), FrameKind::channel_failure), 0u) << "it is no member";
}

}  // namespace
}  // namespace muster::transport
