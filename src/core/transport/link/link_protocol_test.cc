// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/transport/link/link_protocol.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"
#include "testing/fuzz.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

/// Records what a link hears. Payloads go to `sink` (as much as `keep` allows).
class Recorder final : public LinkEvents {
 public:
  Result<MutableBytes> on_payload(const FrameHeader& header) override {
    if (refuse_payloads) return Status(Code::internal, "not wanted");
    sink.assign(std::min<std::size_t>(header.length, keep), '?');
    return writable(sink);
  }
  Status on_frame(const FrameHeader& header, ConstBytes record) override {
    const bool message = header.kind == FrameKind::eager || header.kind == FrameKind::data;
    frames.push_back({header, message ? std::exchange(sink, {}) : std::string(as_text(record))});
    return {};
  }
  void on_sent(const std::shared_ptr<void>& owner) override { sent.push_back(owner.get()); }

  std::string sink;
  std::size_t keep = SIZE_MAX;
  bool refuse_payloads = false;
  std::vector<Frame> frames;
  std::vector<const void*> sent;
};

/// Feeds `bytes`, at most `step` at a time.
Status feed(LinkProtocol& protocol, std::string_view bytes, std::size_t step,
            bool headers_alone = false) {
  while (!bytes.empty()) {
    std::array<MutableBytes, 2> pieces;
    const std::size_t count = protocol.in.input(pieces, headers_alone);
    std::size_t taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t take = std::min({pieces[i].size(), bytes.size() - taken, step - taken});
      std::memcpy(pieces[i].data(), bytes.data() + taken, take);
      taken += take;
    }
    bytes.remove_prefix(taken);
    if (Status status = protocol.in.received(taken); !status) return status;
  }
  return {};
}

/// Takes output, at most `step` bytes at a time, until there is none or `limit` was taken.
std::string drain(LinkProtocol& protocol, std::size_t step = SIZE_MAX,
                  std::size_t limit = SIZE_MAX) {
  std::string out;
  while (protocol.out.has_output() && out.size() < limit) {
    std::array<ConstBytes, FrameWriter::kMaxPieces> pieces;
    const std::size_t count = protocol.out.output(pieces);
    std::size_t taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t take = std::min({pieces[i].size(), step - taken, limit - out.size()});
      out.append(as_text(pieces[i].first(take)));
      taken += take;
    }
    protocol.out.sent(taken);
  }
  return out;
}

std::vector<Frame> sample_frames() {
  return {eager("hello", 1),
          eager("", 2),
          frame_of(FrameKind::ping),
          eager(pattern(kEagerBytes, 3), 3),
          request(9, 1'000'000, 4),
          fragment(9, 0, pattern(70'000, 5)),
          [] {
            Frame failure = frame_of(FrameKind::rank_failure);
            failure.payload = encode_cause(Status(Code::peer_failed, "gone", {1}));
            return failure;
          }(),
          eager("x", 6)};
}

void expect_same(const std::vector<Frame>& got, const std::vector<Frame>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].header.kind, wanted[i].header.kind) << i;
    EXPECT_EQ(got[i].header.tag, wanted[i].header.tag) << i;
    EXPECT_TRUE(got[i].payload == wanted[i].payload) << "payload of frame " << i;
  }
}

TEST(LinkProtocol, ReadsFramesCutAnywhere) {
  std::string bytes;
  for (const Frame& frame : sample_frames()) bytes += frame.bytes();
  for (const std::size_t step :
       {std::size_t{1}, std::size_t{7}, std::size_t{71}, std::size_t{72}, std::size_t{73},
        std::size_t{1000}, std::size_t{65'537}, SIZE_MAX}) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    ASSERT_TRUE(feed(protocol, bytes, step).ok());
    expect_same(recorder.frames, sample_frames());
    Recorder sparing;
    LinkProtocol alone(sparing);
    ASSERT_TRUE(feed(alone, bytes, step, true).ok());
    expect_same(sparing.frames, sample_frames());
    EXPECT_TRUE(alone.in.between_frames());
  }
  // Every single cut of a shorter exchange into two.
  const std::string two = eager(pattern(300, 1), 5).bytes() + eager("tail", 6).bytes();
  for (std::size_t cut = 0; cut <= two.size(); ++cut) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    ASSERT_TRUE(feed(protocol, std::string_view(two).substr(0, cut), SIZE_MAX).ok());
    ASSERT_TRUE(feed(protocol, std::string_view(two).substr(cut), SIZE_MAX).ok());
    expect_same(recorder.frames, {eager(pattern(300, 1), 5), eager("tail", 6)});
  }
}

TEST(LinkProtocol, AHeaderAloneLeavesThePayloadToItsPlace) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  std::array<MutableBytes, 2> pieces;
  ASSERT_EQ(protocol.in.input(pieces, true), 1u);
  EXPECT_EQ(pieces[0].size(), sizeof(FrameHeader));
  const std::string bytes = eager(pattern(5000, 1)).bytes();
  std::memcpy(pieces[0].data(), bytes.data(), 10);
  ASSERT_TRUE(protocol.in.received(10).ok());
  EXPECT_FALSE(protocol.in.between_frames());
  ASSERT_EQ(protocol.in.input(pieces, true), 1u);
  EXPECT_EQ(pieces[0].size(), sizeof(FrameHeader) - 10) << "the rest of it";
  std::memcpy(pieces[0].data(), bytes.data() + 10, pieces[0].size());
  ASSERT_TRUE(protocol.in.received(pieces[0].size()).ok());
  ASSERT_EQ(protocol.in.input(pieces, true), 2u);
  EXPECT_EQ(pieces[0].data(), reinterpret_cast<std::byte*>(recorder.sink.data()));
  EXPECT_EQ(pieces[0].size(), 5000u);
  EXPECT_EQ(pieces[1].size(), sizeof(FrameHeader)) << "of the next frame";
}

TEST(LinkProtocol, WritesFramesCutAnywhere) {
  const std::string small = "small";
  const std::string large = pattern(600'000, 1);
  for (const std::size_t step :
       {std::size_t{1}, std::size_t{50}, std::size_t{72}, std::size_t{100'000}, SIZE_MAX}) {
    Recorder out;
    LinkProtocol sender(out);
    auto owner = std::make_shared<int>(1);
    sender.out.push_message(eager("", 1).header, as_bytes(small), owner);
    auto large_owner = std::make_shared<int>(2);
    sender.out.push_stream(fragment(5, 0, "").header, as_bytes(large), large_owner);
    sender.out.push_control(frame_of(FrameKind::ping).header);
    std::string bytes = drain(sender, step);
    const auto frames = take_frames(bytes);
    ASSERT_EQ(frames.size(), 5u);
    EXPECT_EQ(frames[0].header.kind, FrameKind::ping);
    EXPECT_EQ(frames[1].payload, small);
    std::string joined;
    for (std::size_t i = 2; i < 5; ++i) {
      EXPECT_EQ(frames[i].header.amount, joined.size());
      EXPECT_LE(frames[i].payload.size(), kFragmentBytes);
      joined += frames[i].payload;
    }
    EXPECT_TRUE(joined == large);
    EXPECT_EQ(out.sent, (std::vector<const void*>{owner.get(), large_owner.get()}));
  }
}

TEST(LinkProtocol, GatheredMessagesAreOnePieceInTheirPlace) {
  for (const std::size_t step : {std::size_t{1}, std::size_t{71}, std::size_t{100}, SIZE_MAX}) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    for (int round = 0; round < 3; ++round) {
      const std::string large = pattern(10'000, 3);
      std::vector<Frame> wanted{frame_of(FrameKind::ping), eager("one", 1),  eager("", 2),
                                eager(large, 3),           eager("four", 4), eager("5", 5)};
      std::size_t held = 0;
      for (std::size_t i = 1; i < wanted.size(); ++i) {
        std::string text = wanted[i].payload;
        if (i == 3) {
          protocol.out.push_message(wanted[i].header, as_bytes(large));
          held = 0;
          continue;
        }
        held += sizeof(FrameHeader) + text.size();
        EXPECT_EQ(protocol.out.gather_message(wanted[i].header, as_bytes(text)), held);
        text.assign(text.size(), 'x');  // it has been copied
      }
      protocol.out.push_control(wanted[0].header);
      if (step == SIZE_MAX) {
        std::array<ConstBytes, FrameWriter::kMaxPieces> pieces;
        EXPECT_EQ(protocol.out.output(pieces), 5u)
            << "control, one piece, header and payload, one piece";
      }
      std::string out = drain(protocol, step);
      expect_same(take_frames(out), wanted);
    }
  }
}

TEST(LinkProtocol, TheNewsOfAnEndDoesNotOvertakeWhatWasGathered) {
  for (const FrameKind kind :
       {FrameKind::channel_failure, FrameKind::rank_failure, FrameKind::close}) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    protocol.out.gather_message(eager("one", 1).header, as_bytes(std::string_view("one")));
    protocol.out.gather_message(eager("two", 2).header, as_bytes(std::string_view("two")));
    protocol.out.push_control(frame_of(kind).header);
    protocol.out.push_control(frame_of(FrameKind::ping).header);
    std::string out = drain(protocol);
    expect_same(take_frames(out),
                {eager("one", 1), eager("two", 2), frame_of(kind), frame_of(FrameKind::ping)});
    EXPECT_FALSE(protocol.out.has_output());
  }
}

TEST(LinkProtocol, ControlAndMessagesOvertakeFragments) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  const std::string large = pattern(10 * kFragmentBytes, 1);
  protocol.out.push_stream(fragment(1, 0, "").header, as_bytes(large), std::make_shared<int>());
  std::string bytes = drain(protocol, 1000, 1000);  // the first fragment has begun
  const std::string small = "urgent";
  protocol.out.push_message(eager("", 1).header, as_bytes(small), nullptr);
  protocol.out.push_control(frame_of(FrameKind::pong).header);
  bytes += drain(protocol);
  const auto frames = take_frames(bytes);
  ASSERT_EQ(frames.size(), 12u);
  EXPECT_EQ(frames[1].header.kind, FrameKind::pong);
  EXPECT_EQ(frames[2].header.kind, FrameKind::eager);
}

TEST(LinkProtocol, AFloodOfMessagesLetsFragmentsThrough) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  const std::string small = pattern(kEagerBytes, 1);
  const std::string large = pattern(4 * kFragmentBytes, 2);
  for (int i = 0; i < 200; ++i)
    protocol.out.push_message(eager("").header, as_bytes(small), nullptr);
  protocol.out.push_stream(fragment(1, 0, "").header, as_bytes(large), std::make_shared<int>());
  std::string bytes = drain(protocol);
  const auto frames = take_frames(bytes);
  std::size_t last = 0;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].header.kind == FrameKind::data) last = i;
  }
  EXPECT_LT(last, 100u) << "the large payload waited for all the small ones";
}

TEST(LinkProtocol, LargePayloadsTakeTurnsBetweenChannels) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  const std::string large = pattern(4 * kFragmentBytes, 1);
  // Three payloads on channel 1, one on channel 2: each channel gets every second fragment while
  // both have some.
  for (const auto& [message, channel] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(4, 2)}) {
    protocol.out.push_stream(
        fragment(static_cast<std::uint64_t>(message), 0, "", static_cast<std::uint32_t>(channel))
            .header,
        as_bytes(large), std::make_shared<int>());
  }
  std::string bytes = drain(protocol);
  const auto frames = take_frames(bytes);
  ASSERT_EQ(frames.size(), 16u);
  std::vector<std::uint64_t> order;
  for (std::size_t i = 0; i < 8; ++i) order.push_back(frames[i].header.message);
  EXPECT_EQ(order, (std::vector<std::uint64_t>{1, 4, 2, 4, 3, 4, 1, 4}));
}

TEST(LinkProtocol, DetachedBuffersAreNotReadAnyMore) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  std::string large = pattern(3 * kFragmentBytes, 1);
  const std::string original = large;
  const auto owner = std::make_shared<int>();
  protocol.out.push_stream(fragment(1, 0, "").header, as_bytes(large), owner);
  std::string bytes = drain(protocol, 1000, 1000);
  const auto detached = protocol.out.detach(owner.get());
  EXPECT_TRUE(detached.stream_cut);
  large.assign(large.size(), 'z');
  protocol.out.push_control(frame_of(FrameKind::ping).header);
  bytes += drain(protocol);
  const auto frames = take_frames(bytes);
  ASSERT_EQ(frames.size(), 2u) << "the fragment that had begun, then the ping";
  EXPECT_TRUE(frames[0].payload == original.substr(0, kFragmentBytes));
  EXPECT_TRUE(recorder.sent.empty());

  std::string small = "small";
  const auto other = std::make_shared<int>();
  for (int i = 0; i < 20; ++i)
    protocol.out.push_message(eager("").header, as_bytes(original).first(10), nullptr);
  protocol.out.push_message(eager("").header, as_bytes(small), other);
  EXPECT_TRUE(protocol.out.detach(other.get()).message_dropped);
  bytes += drain(protocol);
  EXPECT_EQ(take_frames(bytes).size(), 20u);
}

TEST(LinkProtocol, DrainsWhatHasNoPlace) {
  Recorder recorder;
  recorder.keep = 10;
  LinkProtocol protocol(recorder);
  ASSERT_TRUE(feed(protocol, fragment(1, 0, pattern(200'000, 1)).bytes() + eager("next", 1).bytes(),
                   100'000)
                  .ok());
  ASSERT_EQ(recorder.frames.size(), 2u);
  EXPECT_EQ(recorder.frames[0].payload, pattern(200'000, 1).substr(0, 10));
  EXPECT_EQ(recorder.frames[1].payload, "next");

  Recorder other;
  LinkProtocol cut(other);
  const std::string bytes = eager(pattern(1000, 1)).bytes();
  ASSERT_TRUE(feed(cut, std::string_view(bytes).substr(0, 500), SIZE_MAX).ok());
  cut.in.drain_payload();
  std::string reused = other.sink =
      std::string(1000, 'r');  // the buffer belongs to somebody else now
  ASSERT_TRUE(feed(cut, std::string_view(bytes).substr(500), SIZE_MAX).ok());
  EXPECT_EQ(other.frames.at(0).payload, reused);
}

TEST(LinkProtocol, RefusesHeadersThatLie) {
  const auto refused = [](Frame frame, std::uint32_t length) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    frame.header.length = length;
    const Status status =
        feed(protocol,
             std::string_view(reinterpret_cast<const char*>(&frame.header), sizeof frame.header),
             SIZE_MAX);
    return !status.ok() && recorder.frames.empty();
  };
  EXPECT_TRUE(refused(frame_of(FrameKind::eager), kEagerBytes + 1));
  EXPECT_TRUE(refused(frame_of(FrameKind::eager), 0xffffffff));
  EXPECT_TRUE(refused(frame_of(FrameKind::data), 0));
  EXPECT_TRUE(refused(frame_of(FrameKind::data), kFragmentBytes + 1));
  EXPECT_TRUE(refused(frame_of(FrameKind::rank_failure), kRecordBytes + 1));
  for (const FrameKind kind : {FrameKind::request, FrameKind::clear, FrameKind::withdraw,
                               FrameKind::refuse, FrameKind::credit, FrameKind::ping,
                               FrameKind::pong, FrameKind::close, FrameKind::close_ack}) {
    EXPECT_TRUE(refused(frame_of(kind), 1)) << name_of(kind);
  }
  EXPECT_TRUE(refused(frame_of(static_cast<FrameKind>(0)), 0));
  EXPECT_TRUE(refused(frame_of(static_cast<FrameKind>(kLastFrameKind + 1)), 0));
  Frame unmarked = frame_of(FrameKind::ping);
  unmarked.header.mark = 0;
  EXPECT_TRUE(refused(unmarked, 0));
  Frame padded = frame_of(FrameKind::ping);
  padded.header.zero = 1;
  EXPECT_TRUE(refused(padded, 0));
}

TEST(LinkProtocol, SaysNothingMoreOnceTheProtocolIsBroken) {
  Recorder recorder;
  LinkProtocol protocol(recorder);
  EXPECT_FALSE(feed(protocol, std::string(100, 'x'), SIZE_MAX).ok());
  EXPECT_FALSE(feed(protocol, eager("late").bytes(), SIZE_MAX).ok());
  Recorder unwilling;
  unwilling.refuse_payloads = true;
  LinkProtocol other(unwilling);
  EXPECT_FALSE(feed(other, eager("x").bytes(), SIZE_MAX).ok());
  EXPECT_TRUE(unwilling.frames.empty());
}

TEST(FrameRecord, CausesKeepCodeRanksAndText) {
  const Status cause(Code::mismatch, "rank 1 called one thing, rank 2 another", {1, 2});
  const auto read = decode_cause(encode_cause(cause), 3);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->code(), cause.code());
  EXPECT_EQ(read->message(), cause.message());
  EXPECT_EQ(read->ranks(), cause.ranks());
  EXPECT_FALSE(decode_cause(encode_cause(cause), 2)) << "rank 2 is outside the job";
  const Status endless(Code::internal, std::string(1'000'000, 'x'), std::vector<int>(100'000, 1));
  EXPECT_LE(encode_cause(endless).size(), kRecordBytes);
  EXPECT_TRUE(decode_cause(encode_cause(endless), 3));
  const std::string record = encode_cause(cause);
  for (std::size_t cut = 0; cut < record.size(); ++cut)
    EXPECT_FALSE(decode_cause(record.substr(0, cut), 3));
  EXPECT_FALSE(decode_cause(record + "x", 3));
}

// A cause of failure from the wire names ranks of the job or is refused.
TEST(FrameRecordFuzz, DamagedCausesNameRanksOfTheJobOrNothing) {
  muster::testing::Fuzz fuzz(21);
  const std::string good = encode_cause(Status(Code::peer_failed, "rank 2 is gone", {0, 2}));
  for (muster::testing::FuzzRun run(3000); run.goes_on();) {
    const auto cause = decode_cause(fuzz.one_in(8) ? fuzz.noise(100) : fuzz.damaged(good), 3);
    if (!cause) continue;
    EXPECT_FALSE(cause->ok());
    for (const int rank : cause->ranks()) EXPECT_TRUE(rank >= 0 && rank < 3) << rank;
  }
}

// Random bytes, and good streams with bytes changed: never a crash, never a payload past what the
// header allows.
TEST(LinkProtocolFuzz, SurvivesRandomAndDamagedInput) {
  muster::testing::Fuzz fuzz(20);
  const auto random = [&fuzz] { return fuzz.word(); };
  std::string good;
  for (const Frame& frame : sample_frames()) good += frame.bytes();
  muster::testing::FuzzRun run(2000);
  for (int round = 0; run.goes_on(); ++round) {
    Recorder recorder;
    LinkProtocol protocol(recorder);
    std::string bytes;
    if (round % 2 == 0) {
      bytes.resize(random() % 2000);
      for (char& c : bytes) c = static_cast<char>(random());
      FrameHeader header;
      header.kind = static_cast<FrameKind>(random() % 16);
      header.length = static_cast<std::uint32_t>(random() % 3 == 0 ? random() : random() % 2000);
      bytes.insert(0, reinterpret_cast<const char*>(&header), sizeof header);
    } else {
      bytes = fuzz.damaged(good);
    }
    const Status status = feed(protocol, bytes, 1 + random() % 5000);
    std::size_t total = 0;
    for (const Frame& frame : recorder.frames) total += sizeof(FrameHeader) + frame.payload.size();
    EXPECT_LE(total, bytes.size());
    EXPECT_TRUE(status.ok() || !status.message().empty());
  }
}

}  // namespace
}  // namespace muster::transport
