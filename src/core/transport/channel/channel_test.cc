// SPDX-License-Identifier: BSD-3-Clause
// Channels of one real fabric against peers that the test plays frame by frame.
#include "core/transport/channel/channel.h"

#include <gtest/gtest.h>

#include <random>

#include "core/base/dtype.h"
#include "core/transport/channel/channel_table.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"
#include "testing/fuzz.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

Fingerprint call_of(std::uint64_t sequence, std::uint8_t op = 1, DType dtype = DType::uint8) {
  Fingerprint call;
  call.sequence = sequence;
  call.op = op;
  call.dtype = static_cast<std::uint8_t>(dtype);
  return call;
}

/// Calls agree when they are equal; they read "op 3 on float32".
class PlainRules final : public FingerprintRules {
 public:
  bool agree(const Fingerprint& a, const Fingerprint& b) const override { return a == b; }
  std::string describe(const Fingerprint& call) const override {
    return "op " + std::to_string(call.op) + " on " +
           std::string(name_of(static_cast<DType>(call.dtype)));
  }
};

// ---- matching

// spec: E1 order messages of one tag between two ranks keep their order, small and large mixed
TEST(Channel, MessagesOfOneTagKeepTheirOrder) {
  ScriptedJob job;
  std::string a(3, 'x'), b(50'000, 'x'), c(3, 'x');
  const TransferRef first = job.channel().receive(1, 5, writable(a), {});
  job.say(1, eager("one", 5));
  job.say(1, request(1, 50'000, 5));
  job.say(1, eager("tri", 5));
  EXPECT_TRUE(first->done());
  const TransferRef second = job.channel().receive(1, 5, writable(b), {});
  const TransferRef third = job.channel().receive(1, 5, writable(c), {});
  EXPECT_TRUE(third->done())
      << "the third message is here; only its turn counts, not the second's bytes";
  EXPECT_FALSE(second->done());
  job.say(1, fragment(1, 0, pattern(50'000, 1)));
  EXPECT_TRUE(second->done());
  EXPECT_EQ(a, "one");
  EXPECT_TRUE(b == pattern(50'000, 1));
  EXPECT_EQ(c, "tri");
}

// spec: E1 overtaking a message of another tag passes one that nobody has taken
TEST(Channel, TagsOvertake) {
  ScriptedJob job;
  job.say(1, eager("early", 1));
  job.say(1, request(1, 100'000, 2));
  job.say(1, eager("late", 3));
  std::string late(4, 'x'), early(5, 'x');
  EXPECT_TRUE(job.channel().receive(1, 3, writable(late), {})->done());
  EXPECT_EQ(late, "late");
  EXPECT_TRUE(job.channel().receive(1, 1, writable(early), {})->done());
  EXPECT_EQ(early, "early");
}

// spec: E2 a receive from any rank takes the message that came first; the receive posted first gets
// the next message
TEST(Channel, AnySourceTakesTurnsWithNamedSources) {
  ScriptedJob job(3);
  job.say(2, eager("b", 1));
  job.say(1, eager("a", 1));
  std::string x(1, ' '), y(1, ' ');
  TransferRef any = job.channel().receive(kAnyMember, 1, writable(x), {});
  ASSERT_TRUE(any->done());
  EXPECT_EQ(any->source(), 2);
  EXPECT_EQ(x, "b");
  EXPECT_TRUE(job.channel().receive(1, 1, writable(y), {})->done());

  any = job.channel().receive(kAnyMember, 1, writable(x), {});
  const TransferRef named = job.channel().receive(1, 1, writable(y), {});
  job.say(1, eager("1", 1));
  EXPECT_TRUE(any->done());
  EXPECT_FALSE(named->done());
  job.say(1, eager("2", 1));
  EXPECT_TRUE(named->done());
  EXPECT_EQ(x + y, "12");
}

TEST(Channel, SequencesNeverMeet) {
  ScriptedJob job;
  std::string x(1, ' ');
  const TransferRef receive = job.channel().receive(1, 0, writable(x), call_of(2));
  job.say(1, eager("1", 0, 0, call_of(1)));
  job.say(1, eager("p", 0));
  EXPECT_FALSE(receive->done());
  job.say(1, eager("2", 0, 0, call_of(2)));
  EXPECT_TRUE(receive->done());
  EXPECT_EQ(x, "2");
  EXPECT_EQ(receive->fingerprint(), call_of(2));
}

TEST(Channel, SendsToItself) {
  ScriptedJob job;
  std::string small(4, 'x');
  std::string large(1'000'000, 'x');
  const std::string source = pattern(1'000'000, 1);
  const TransferRef early = job.channel().send(0, 1, as_bytes("self"), {});
  EXPECT_TRUE(job.channel().receive(0, 1, writable(small), {})->done());
  EXPECT_TRUE(early->done());
  const TransferRef receive = job.channel().receive(kAnyMember, 2, writable(large), {});
  EXPECT_TRUE(job.channel().send(0, 2, as_bytes(source), {})->done());
  EXPECT_TRUE(receive->done());
  EXPECT_EQ(receive->source(), 0);
  EXPECT_EQ(small, "self");
  EXPECT_TRUE(large == source);
}

// spec: E4 a message of another size or dtype fails the receive, naming both; the channel goes on
TEST(Channel, AMisfitFailsTheReceiveAlone) {
  ScriptedJob job;
  std::string four(4, 'x');
  const Fingerprint ints = call_of(0, 0, DType::int32);
  const Fingerprint floats = call_of(0, 0, DType::float32);
  // Sizes, the receive waiting.
  TransferRef receive = job.channel().receive(1, 1, writable(four), ints);
  job.say(1, eager("12345678", 1, 0, ints));
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::mismatch);
  EXPECT_EQ(receive->status().ranks(), (std::vector<int>{1, 0}));
  EXPECT_NE(receive->status().message().find("rank 1 sent a message of int32 of 8 bytes"),
            std::string::npos)
      << receive->status().message();
  EXPECT_NE(receive->status().message().find("rank 0 receives a message of int32 of 4 bytes"),
            std::string::npos)
      << receive->status().message();
  EXPECT_EQ(four, "xxxx");
  // Types, the message waiting.
  job.say(1, eager("1234", 1, 0, floats));
  receive = job.channel().receive(1, 1, writable(four), ints);
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::mismatch);
  EXPECT_NE(receive->status().message().find("float32"), std::string::npos);
  EXPECT_NE(receive->status().message().find("int32"), std::string::npos);
  // A large one is refused, not carried.
  receive = job.channel().receive(1, 1, writable(four), ints);
  job.say(1, request(1, 1'000'000, 1, 0, ints));
  EXPECT_EQ(receive->status().code(), Code::mismatch);
  EXPECT_EQ(kinds(job.heard(1)), (std::vector{FrameKind::refuse}));
  // A shorter one is fine where it may be; a longer one never.
  receive = job.channel().receive(1, 1, writable(four), ints, false);
  job.say(1, eager("ab", 1, 0, ints));
  EXPECT_TRUE(receive->status().ok());
  EXPECT_EQ(receive->bytes(), 2u);
  EXPECT_EQ(four, "abxx");
  receive = job.channel().receive(1, 1, writable(four), ints, false);
  job.say(1, eager("abcde", 1, 0, ints));
  EXPECT_EQ(receive->status().code(), Code::mismatch);
  EXPECT_EQ(four, "abxx");
  EXPECT_FALSE(job.channel().failed());
}

TEST(Channel, RefusesMembersThatAreNotThere) {
  ScriptedJob job;
  std::string one(1, 'x');
  EXPECT_EQ(job.channel().send(2, 0, as_bytes("x"), {})->status().code(), Code::invalid_argument);
  EXPECT_EQ(job.channel().receive(-2, 0, writable(one), {})->status().code(),
            Code::invalid_argument);
  EXPECT_EQ(job.channel().receive(kAnyMember, 0, writable(one), call_of(1))->status().code(),
            Code::invalid_argument);
}

// ---- the wire

TEST(Channel, AWholeExchangeSurvivesEveryCut) {
  const std::string payload = pattern(1000, 1);
  const std::string large = pattern(20'000, 2);
  const std::string bytes = eager(payload, 1).bytes() + request(1, large.size(), 2).bytes() +
                            fragment(1, 0, large.substr(0, 300)).bytes() + eager("", 3).bytes() +
                            fragment(1, 300, large.substr(300)).bytes();
  // The whole of the first part cut at every byte; the long tail byte by byte once.
  for (std::size_t cut = 0; cut < 1700; ++cut) {
    ScriptedJob job;
    std::string small(payload.size(), 'x'), big(large.size(), 'x'), none;
    // Receives are posted in the middle of what they are for.
    ScriptedWire& wire = job.wire(1);
    const TransferRef two = job.channel().receive(1, 2, writable(big), {});
    wire.to_fabric = bytes.substr(0, cut);
    job.settle();
    const TransferRef one = job.channel().receive(1, 1, writable(small), {});
    wire.to_fabric += bytes.substr(cut);
    job.settle();
    const TransferRef three = job.channel().receive(1, 3, writable(none), {});
    ASSERT_TRUE(one->done() && two->done() && three->done()) << cut;
    ASSERT_TRUE(one->status().ok() && small == payload) << cut;
    ASSERT_TRUE(two->status().ok() && big == large) << cut;
  }
  ScriptedJob job;
  job.wire(1).chunk = 1;
  std::string small(payload.size(), 'x'), big(large.size(), 'x');
  const TransferRef two = job.channel().receive(1, 2, writable(big), {});
  job.wire(1).to_fabric = bytes;
  job.settle();
  EXPECT_TRUE(job.channel().receive(1, 1, writable(small), {})->done());
  EXPECT_TRUE(two->done() && big == large && small == payload);
}

TEST(Channel, ASlowReaderLosesNothing) {
  ScriptedJob job;
  const std::string small = pattern(5000, 1);
  const std::string large = pattern(400'000, 2);
  ScriptedWire& wire = job.wire(1);
  wire.room = 0;
  const TransferRef one = job.channel().send(1, 1, as_bytes(small), {});
  const TransferRef two = job.channel().send(1, 2, as_bytes(large), {});
  std::mt19937_64 random(muster::testing::test_seed());
  std::vector<Frame> frames;
  for (int i = 0; i < 100'000 && !(one->done() && two->done()); ++i) {
    wire.room = random() % 3000;
    job.settle();
    for (Frame& frame : job.heard(1)) {
      if (frame.header.kind == FrameKind::request) {
        Frame clear = frame_of(FrameKind::clear);
        clear.header.message = frame.header.message;
        job.say(1, clear);
      }
      frames.push_back(std::move(frame));
    }
  }
  ASSERT_TRUE(one->done() && two->done());
  std::string got;
  for (const Frame& frame : frames) {
    EXPECT_TRUE(frame.header.kind != FrameKind::eager || frame.payload == small);
    if (frame.header.kind == FrameKind::data) got += frame.payload;
  }
  wire.room = SIZE_MAX;
  for (const Frame& frame : job.heard(1)) got += frame.payload;
  EXPECT_TRUE(got == large);
}

TEST(Channel, ABrokenProtocolFailsThatLinkByName) {
  const auto breaks = [](const std::function<void(ScriptedJob&)>& what) {
    ScriptedJob job(3);
    job.wire(1);
    job.wire(2);
    what(job);
    const Status death = job.fabric->death_of(1);
    EXPECT_TRUE(job.wires[1]->closed || death.ok());
    EXPECT_TRUE(job.fabric->death_of(2).ok());
    EXPECT_TRUE(death.ok() || death.ranks() == std::vector<int>{1});
    EXPECT_TRUE(death.ok() ||
                death.message().find("rank 1 has broken the message protocol") != std::string::npos)
        << death.message();
    EXPECT_EQ(job.channel().failed(), !death.ok());
    return !death.ok();
  };
  EXPECT_TRUE(breaks([](ScriptedJob& job) { job.say(1, fragment(7, 0, "nobody asked")); }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) { job.say(1, request(1, 0)); }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) {
    Frame credit = frame_of(FrameKind::credit);
    credit.header.amount = 1;
    job.say(1, credit);
  }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) { job.say(1, frame_of(FrameKind::clear)); }) == false)
      << "an id that was taken back is no crime";
  EXPECT_TRUE(breaks([](ScriptedJob& job) {
    Frame clear = frame_of(FrameKind::clear);
    clear.header.message = 1;
    job.say(1, clear);
  }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) {
    Frame refuse = frame_of(FrameKind::refuse);
    refuse.header.message = 99;
    job.say(1, refuse);
  }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) {
    Frame failure = frame_of(FrameKind::channel_failure);
    failure.payload = "nonsense";
    job.say(1, failure);
  }));
  EXPECT_TRUE(breaks([](ScriptedJob& job) {
    Frame failure = frame_of(FrameKind::rank_failure);
    failure.header.message = 17;
    failure.payload = encode_cause(Status(Code::peer_failed, "x", {2}));
    job.say(1, failure);
  }));
  // Fragments past the announced end, or not where the last one ended.
  for (const auto& [at, bytes] : {std::pair(0, 50'001), std::pair(1, 10)}) {
    EXPECT_TRUE(breaks([at = at, bytes = bytes](ScriptedJob& job) {
      static std::string big(50'000, 'x');
      job.channel().receive(1, 1, writable(big), {});
      job.say(1, request(1, 50'000, 1));
      job.say(1, fragment(1, static_cast<std::uint64_t>(at),
                          std::string(static_cast<std::size_t>(bytes), 'y')));
    }));
  }
}

// A message of which the stream takes a part at once is whole in the end, wherever it was cut, also
// where its sender takes it back.
TEST(Channel, MessagesTakenInPartAreWholeInTheEnd) {
  const std::string text = pattern(100, 3);
  const std::size_t whole = sizeof(FrameHeader) + text.size();
  for (std::size_t room = 0; room <= whole; ++room) {
    for (const bool taken_back : {false, true}) {
      ScriptedJob job;
      ScriptedWire& wire = job.wire(1);
      job.heard(1);
      wire.room = room;
      std::string out = text;
      const auto sent = job.channel().send(1, 3, as_bytes(out), {});
      EXPECT_EQ(sent->done(), room == whole);
      const auto next = job.channel().send(1, 4, as_bytes("next"), {});
      if (taken_back) {
        job.channel().cancel(sent);
        EXPECT_EQ(sent->status().ok(), room == whole);
        out.assign(out.size(), '?');
      }
      wire.room = SIZE_MAX;
      const auto frames = job.heard(1);
      ASSERT_EQ(frames.size(), 2u) << room;
      EXPECT_EQ(frames[0].payload, text);
      EXPECT_EQ(frames[0].header.tag, 3u);
      EXPECT_EQ(frames[1].payload, "next");
      EXPECT_TRUE(sent->done());
      EXPECT_TRUE(next->done());
    }
  }
}

// Random frames with plausible and implausible fields: the fabric either takes them or ends the
// link by name.
TEST(ChannelFuzz, SurvivesFramesThatMakeNoSense) {
  std::mt19937_64 random(muster::testing::test_seed());
  for (muster::testing::FuzzRun run(400); run.goes_on();) {
    ScriptedJob job(3);
    const std::string out = pattern(40'000, 1);
    std::string in(40'000, 'x'), any(100, 'x');
    job.wire(1);
    std::vector<TransferRef> transfers{
        job.channel().send(1, 0, as_bytes(out), {}), job.channel().receive(1, 0, writable(in), {}),
        job.channel().receive(kAnyMember, 1, writable(any), {}, false)};
    for (int i = 0; i < 40 && !job.wires[1]->closed; ++i) {
      Frame frame = frame_of(static_cast<FrameKind>(1 + random() % kLastFrameKind),
                             static_cast<std::uint32_t>(random() % 3));
      frame.header.tag = random() % 3;
      frame.header.message = random() % 4;
      frame.header.amount = random() % 5 == 0 ? random() : random() % 50'000;
      frame.header.call = call_of(random() % 4, static_cast<std::uint8_t>(random() % 2));
      if (frame.header.kind == FrameKind::eager || frame.header.kind == FrameKind::data)
        frame.payload.assign(random() % kEagerBytes, 'f');
      if (frame.header.kind == FrameKind::rank_failure ||
          frame.header.kind == FrameKind::channel_failure) {
        frame.payload = random() % 2 == 0 ? encode_cause(Status(Code::peer_failed, "?", {2}))
                                          : std::string(random() % 100, 'f');
      }
      job.say(1, frame);
      if (random() % 4 == 0) job.channel().cancel(transfers[random() % 3]);
      if (random() % 8 == 0) job.channel().begin(call_of(random() % 4));
    }
    job.end(1);
    job.advance(std::chrono::seconds(1));
    for (int t = 0; t < 2; ++t) EXPECT_TRUE(transfers[static_cast<std::size_t>(t)]->done());
  }
}

// ---- calls

// spec: F18 different calls the rank that sees two members' calls disagree tells all, naming both
// calls and ranks
TEST(ChannelCalls, DisagreeingCallsFailTheChannelEverywhere) {
  const PlainRules rules;
  for (const bool message_first : {true, false}) {
    for (const bool large : {true, false}) {
      ScriptedJob job(3, 0, &rules);
      job.wire(1);
      job.wire(2);
      std::string got(4, 'x');
      const Frame theirs =
          large ? request(1, 100'000, 0, 0, call_of(3, 7)) : eager("data", 0, 0, call_of(3, 7));
      if (message_first) job.say(1, theirs);
      job.channel().begin(call_of(3, 8));
      const TransferRef receive = job.channel().receive(2, 0, writable(got), call_of(3, 8));
      if (!message_first) job.say(1, theirs);
      const Status failure = job.channel().failure();
      EXPECT_EQ(failure.code(), Code::mismatch);
      EXPECT_EQ(failure.ranks(), (std::vector<int>{0, 1}));
      EXPECT_NE(
          failure.message().find("rank 0 called op 8 on uint8 while rank 1 called op 7 on uint8"),
          std::string::npos)
          << failure.message();
      EXPECT_NE(failure.message().find("number 3"), std::string::npos);
      EXPECT_EQ(receive->status().code(), Code::mismatch);
      for (const int peer : {1, 2}) {
        const auto frames = job.heard(peer);
        ASSERT_EQ(kinds(frames), (std::vector{FrameKind::channel_failure}))
            << "each member hears it once";
        EXPECT_EQ(decode_cause(frames[0].payload, 3)->message(), failure.message());
      }
    }
  }
}

TEST(ChannelCalls, AgreeingCallsAndOldOnesPass) {
  const PlainRules rules;
  ScriptedJob job(2, 0, &rules);
  for (std::uint64_t sequence = 1; sequence <= 300; ++sequence) {
    if (sequence % 2 == 0) job.say(1, eager("x", 0, 0, call_of(sequence)));
    job.channel().begin(call_of(sequence));
    job.channel().compare(1, call_of(sequence));
    if (sequence % 2 == 1) job.say(1, eager("x", 0, 0, call_of(sequence)));
    std::string got(1, ' ');
    EXPECT_TRUE(job.channel().receive(1, 0, writable(got), call_of(sequence))->done());
  }
  job.say(1, eager("x", 0, 0, call_of(2, 99)));  // long over: not known any more
  EXPECT_FALSE(job.channel().failed());
  job.say(1, eager("x", 0, 0, call_of(299, 99)));  // a moment ago
  EXPECT_TRUE(job.channel().failed());
}

// spec: F18 returned a rank that has already returned learns it from the late message
TEST(ChannelCalls, CallsSeenElsewhereCountToo) {
  const PlainRules rules;
  ScriptedJob job(2, 0, &rules);
  job.channel().compare(1, call_of(5, 1));
  EXPECT_FALSE(job.channel().failed());
  job.channel().begin(call_of(5, 2));
  EXPECT_EQ(job.channel().failure().code(), Code::mismatch);
}

}  // namespace
}  // namespace muster::transport
