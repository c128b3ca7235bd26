// SPDX-License-Identifier: BSD-3-Clause
// Small messages that one thread sends in one stretch leave in one write for each link, late by no
// more than the stretch, and in order.
#include "core/transport/link/send_batch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <random>
#include <thread>

#include "core/transport/channel/channel_table.h"
#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"
#include "testing/seed.h"

namespace muster::transport {
namespace {

using std::chrono::seconds;

/// Sends text that tells its tag, `bytes` long, from memory that is not kept: only what is copied
/// at once may be sent so.
TransferRef send_copied(ScriptedJob& job, std::uint64_t tag, std::size_t bytes, int peer = 1) {
  std::string text = pattern(bytes, tag);
  TransferRef sent = job.channel().send(peer, tag, as_bytes(text), {});
  text.assign(bytes, 'x');
  return sent;
}

void expect_patterns(const std::vector<Frame>& frames, std::uint64_t first_tag, std::size_t count) {
  ASSERT_EQ(frames.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(frames[i].header.kind, FrameKind::eager) << i;
    EXPECT_EQ(frames[i].header.tag, first_tag + i);
    EXPECT_TRUE(frames[i].payload == pattern(frames[i].payload.size(), first_tag + i))
        << "payload " << i;
  }
}

TEST(SendBatch, SmallMessagesToAPeerAreOneWrite) {
  ScriptedJob job(3);
  const ScriptedWire& one = job.wire(1);
  const ScriptedWire& two = job.wire(2);
  const int before_one = one.writes, before_two = two.writes;
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < 20; ++tag) {
      const TransferRef sent = send_copied(job, tag, tag == 7 ? 0 : tag * 13, tag < 15 ? 1 : 2);
      ASSERT_TRUE(sent->done());
      EXPECT_TRUE(sent->status().ok());
    }
    EXPECT_EQ(one.writes, before_one);
    EXPECT_EQ(two.writes, before_two);
  }
  EXPECT_EQ(one.writes, before_one + 1);
  EXPECT_EQ(two.writes, before_two + 1);
  expect_patterns(job.heard(1), 0, 15);
  expect_patterns(job.heard(2), 15, 5);
}

TEST(SendBatch, StretchesOfTwoFabricsEndInAnyOrder) {
  ScriptedJob one(2), two(2);
  std::optional<SendBatch> first, second;
  first.emplace(*one.fabric);
  second.emplace(*two.fabric);
  first.reset();
  const int before_one = one.wire(1).writes, before_two = two.wire(1).writes;
  EXPECT_TRUE(send_copied(one, 1, 10)->done());
  EXPECT_EQ(one.wire(1).writes, before_one + 1) << "its stretch is over";
  EXPECT_TRUE(send_copied(two, 1, 10)->done());
  EXPECT_EQ(two.wire(1).writes, before_two) << "its stretch is not";
  second.reset();
  EXPECT_EQ(two.wire(1).writes, before_two + 1);
}

TEST(SendBatch, ALoneMessageGoesAtOnceAndNothingCostsNothing) {
  ScriptedJob job;
  const ScriptedWire& wire = job.wire(1);
  const int before = wire.writes;
  { const SendBatch batch = job.fabric->batch_sends(); }
  EXPECT_EQ(wire.writes, before);
  EXPECT_TRUE(send_copied(job, 0, 4)->done());
  EXPECT_EQ(wire.writes, before + 1);
  expect_patterns(job.heard(1), 0, 1);
}

TEST(SendBatch, LargerMessagesTakeAlongWhatStandsBeforeThem) {
  ScriptedJob job;
  ScriptedWire& wire = job.wire(1);
  int writes = wire.writes;
  const std::string eager_one = pattern(20'000, 2), asks = pattern(100'000, 4);
  TransferRef large;
  {
    const SendBatch batch = job.fabric->batch_sends();
    send_copied(job, 0, 8);
    send_copied(job, 1, 8);
    EXPECT_TRUE(job.channel().send(1, 2, as_bytes(eager_one), {})->done());
    EXPECT_EQ(wire.writes, ++writes);
    send_copied(job, 3, 8);
    large = job.channel().send(1, 4, as_bytes(asks), {});
    EXPECT_EQ(wire.writes, ++writes);
    send_copied(job, 5, 8);
    EXPECT_EQ(wire.writes, writes);
  }
  EXPECT_EQ(wire.writes, ++writes);
  const auto frames = job.heard(1);
  ASSERT_EQ(frames.size(), 6u);
  for (std::size_t i = 0; i < frames.size(); ++i) EXPECT_EQ(frames[i].header.tag, i);
  EXPECT_EQ(frames[4].header.kind, FrameKind::request);
  EXPECT_TRUE(frames[2].payload == eager_one);
  EXPECT_FALSE(large->done());
}

TEST(SendBatch, EnoughForAWriteIsWritten) {
  ScriptedJob job;
  const ScriptedWire& wire = job.wire(1);
  const int before = wire.writes;
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < 40; ++tag) {
      send_copied(job, tag, 4096);
      EXPECT_GE(wire.from_fabric.size() + 36 * 1024, (tag + 1) * (sizeof(FrameHeader) + 4096))
          << "more is held back";
    }
  }
  EXPECT_LE(wire.writes, before + 6);
  expect_patterns(job.heard(1), 0, 40);
}

TEST(SendBatch, IsWrittenBeforeAPollAndAWait) {
  ScriptedJob job;
  const ScriptedWire& wire = job.wire(1);
  const SendBatch batch = job.fabric->batch_sends();
  int writes = wire.writes;
  send_copied(job, 0, 4);
  EXPECT_EQ(wire.writes, writes);
  job.fabric->poll();
  EXPECT_EQ(wire.writes, ++writes);
  send_copied(job, 1, 4);
  send_copied(job, 2, 4);
  bool waits = false;
  job.fabric->wait(
      [&] {
        // The first question comes before anybody waits; from then on what is sent goes at once.
        if (!std::exchange(waits, true)) return false;
        EXPECT_EQ(wire.writes, ++writes);
        send_copied(job, 3, 4);
        EXPECT_EQ(wire.writes, ++writes);
        return true;
      },
      TimePoint::max());
  send_copied(job, 4, 4);
  EXPECT_EQ(wire.writes, writes) << "after the wait the stretch goes on";
  expect_patterns(job.heard(1), 0, 5);
}

TEST(SendBatch, AnotherThreadsMessageKeepsItsPlaceAndIsNotHeldBack) {
  ScriptedJob job;
  const ScriptedWire& wire = job.wire(1);
  int writes = wire.writes;
  {
    const SendBatch batch = job.fabric->batch_sends();
    send_copied(job, 0, 4);
    std::thread([&] { send_copied(job, 1, 4); }).join();
    EXPECT_EQ(wire.writes, ++writes);
    send_copied(job, 2, 4);
    std::thread([&] {
      const SendBatch theirs = job.fabric->batch_sends();
      send_copied(job, 3, 4);
    }).join();
    EXPECT_EQ(wire.writes, ++writes);
    send_copied(job, 4, 4);
    std::thread([&] { job.fabric->poll(); }).join();
    EXPECT_EQ(wire.writes, writes) << "others' passes leave it alone";
  }
  EXPECT_EQ(wire.writes, ++writes);
  expect_patterns(job.heard(1), 0, 5);
}

TEST(SendBatch, WithinAnotherItDoesNothing) {
  ScriptedJob job, other;
  const ScriptedWire& wire = job.wire(1);
  const ScriptedWire& others = other.wire(1);
  const int before = wire.writes, others_before = others.writes;
  {
    const SendBatch batch = job.fabric->batch_sends();
    send_copied(job, 0, 4);
    {
      const SendBatch within = job.fabric->batch_sends();
      send_copied(job, 1, 4);
    }
    EXPECT_EQ(wire.writes, before);
    send_copied(other, 0, 4);
    EXPECT_EQ(others.writes, others_before + 1) << "of one fabric only";
    {
      const SendBatch of_other = other.fabric->batch_sends();
      send_copied(other, 1, 4);
      send_copied(job, 2, 4);
    }
    EXPECT_EQ(others.writes, others_before + 2);
    EXPECT_EQ(wire.writes, before);
  }
  EXPECT_EQ(wire.writes, before + 1);
  expect_patterns(job.heard(1), 0, 3);
  expect_patterns(other.heard(1), 0, 2);
}

TEST(SendBatch, AFullStreamTakesTheRestLater) {
  ScriptedJob job;
  ScriptedWire& wire = job.wire(1);
  wire.room = 100;
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < 5; ++tag) send_copied(job, tag, 50);
  }
  const std::string kept = pattern(50, 5);
  TransferRef waits;
  {
    const SendBatch batch = job.fabric->batch_sends();
    waits = job.channel().send(1, 5, as_bytes(kept), {});
    EXPECT_FALSE(waits->done())
        << "behind what the stream could not take: the sender's own memory is the limit";
  }
  EXPECT_EQ(wire.from_fabric.size(), 100u);
  wire.room = SIZE_MAX;
  expect_patterns(job.heard(1), 0, 6);
  EXPECT_TRUE(waits->done());
}

TEST(SendBatch, CreditLimitsItToo) {
  ScriptedJob job;
  job.wire(1);
  const std::size_t most = kEagerCredit / 4096;
  std::vector<std::string> texts;
  std::vector<TransferRef> sent;
  for (std::uint64_t tag = 0; tag < most + 10; ++tag) texts.push_back(pattern(4096, tag));
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < texts.size(); ++tag)
      sent.push_back(job.channel().send(1, tag, as_bytes(texts[tag]), {}));
  }
  const auto frames = job.heard(1);
  ASSERT_EQ(frames.size(), texts.size());
  for (std::size_t i = 0; i < frames.size(); ++i) {
    EXPECT_EQ(frames[i].header.tag, i);
    EXPECT_EQ(frames[i].header.kind, i < most ? FrameKind::eager : FrameKind::request) << i;
    EXPECT_EQ(sent[i]->done(), i < most) << i;
  }
}

TEST(SendBatch, WaitsForALinkThatIsNotUpYet) {
  ScriptedJob job;
  const std::string texts[] = {pattern(4, 0), pattern(4, 1)};
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < 2; ++tag)
      EXPECT_FALSE(job.channel().send(1, tag, as_bytes(texts[tag]), {})->done());
  }
  expect_patterns(job.heard(1), 0, 2);
}

TEST(SendBatch, ALinkThatBreaksMeanwhileFailsTheSendersChannel) {
  ScriptedJob job;
  ScriptedWire& wire = job.wire(1);
  std::string text(4, 'x');
  const TransferRef receive = job.channel().receive(1, 9, writable(text), {});
  {
    const SendBatch batch = job.fabric->batch_sends();
    send_copied(job, 0, 4);
    wire.ended = true;
    send_copied(job, 1, 4);
    EXPECT_FALSE(job.channel().failed());
  }
  EXPECT_TRUE(wire.closed) << "the end of the stretch has met the failure";
  job.advance(seconds(1));
  EXPECT_EQ(job.channel().failure().code(), Code::peer_failed) << job.channel().failure().message();
  EXPECT_EQ(job.channel().failure().ranks(), std::vector<int>{1});
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().code(), Code::peer_failed);
  const SendBatch batch = job.fabric->batch_sends();
  const TransferRef late = send_copied(job, 2, 4);
  ASSERT_TRUE(late->done());
  EXPECT_EQ(late->status().code(), Code::peer_failed);
}

TEST(SendBatch, AForkedChildWritesNothingOfItsParents) {
  ScriptedJob job;
  const ScriptedWire& wire = job.wire(1);
  std::optional<SendBatch> batch(std::in_place, *job.fabric);
  send_copied(job, 0, 4);
  const pid_t child = ::fork();
  if (child == 0) {
    batch.reset();
    ::_exit(wire.from_fabric.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  batch.reset();
  expect_patterns(job.heard(1), 0, 1);
}

TEST(SendBatch, TrafficCountsMessagesAndWrites) {
  ScriptedJob job;
  job.wire(1);
  const Traffic before = job.fabric->traffic();
  {
    const SendBatch batch = job.fabric->batch_sends();
    for (std::uint64_t tag = 0; tag < 10; ++tag) send_copied(job, tag, 4);
  }
  send_copied(job, 10, 4);
  const Traffic after = job.fabric->traffic();
  EXPECT_EQ(after.messages - before.messages, 11u);
  EXPECT_EQ(after.writes - before.writes, 2u);
}

class TogetherOver : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, TogetherOver, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "region" : "streams"; });

// Two threads on each side, each with stretches of its own and messages of every size, over streams
// that are often full.
TEST_P(TogetherOver, ThreadsKeepTheOrderOfTheirMessages) {
  constexpr int kThreads = 2;
  constexpr std::uint64_t kMessages = 600;
  LoopbackJob job(2, GetParam());
  job.run([](Fabric& fabric) {
    Channel& channel = fabric.bootstrap();
    const int peer = 1 - fabric.rank();
    const auto size_of = [](std::mt19937_64& random) -> std::size_t {
      return random() % 12 == 0  ? random() % 50'000
             : random() % 6 == 0 ? random() % 6000
                                 : random() % 100;
    };
    const auto one_thread = [&](std::uint64_t thread) {
      std::mt19937_64 sizes(thread);  // the same on both sides
      std::mt19937_64 random(testing::test_seed() + thread +
                             10 * static_cast<std::uint64_t>(fabric.rank()));
      std::vector<std::string> out, in;
      std::vector<TransferRef> transfers;
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        const std::size_t bytes = size_of(sizes);
        out.push_back(pattern(bytes, i));
        in.emplace_back(bytes, 'x');
      }
      for (std::uint64_t i = 0; i < kMessages; ++i)
        transfers.push_back(channel.receive(peer, thread, writable(in[i]), {}));
      std::optional<SendBatch> batch;
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        if (random() % 8 == 0) batch.reset();
        if (random() % 8 == 0 && !batch) batch.emplace(fabric);
        if (random() % 32 == 0) fabric.poll();
        transfers.push_back(channel.send(peer, thread, as_bytes(out[i]), {}));
        if (random() % 64 == 0) {
          ASSERT_TRUE(finish(fabric, transfers.back()).ok());
        }
      }
      for (const TransferRef& transfer : transfers)
        ASSERT_TRUE(finish(fabric, transfer).ok()) << transfer->status().message();
      for (std::uint64_t i = 0; i < kMessages; ++i)
        ASSERT_TRUE(in[i] == out[i]) << "message " << i << " of thread " << thread;
    };
    std::thread second([&] { one_thread(kThreads - 1); });
    one_thread(0);
    second.join();
  });
}

}  // namespace
}  // namespace muster::transport
