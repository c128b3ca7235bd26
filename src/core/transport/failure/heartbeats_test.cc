// SPDX-License-Identifier: BSD-3-Clause
// Silence: suspicion, verdict and what the kernel says, on a hand-moved clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>

#include "core/transport/testing/loopback_job.h"
#include "core/transport/testing/scripted_job.h"
#include "testing/limits.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::size_t frames_of(const std::vector<Frame>& frames, FrameKind kind) {
  return static_cast<std::size_t>(std::count_if(
      frames.begin(), frames.end(), [kind](const Frame& f) { return f.header.kind == kind; }));
}

/// Lets time pass in beats, answering for the peers in `alive`.
void beat(ScriptedJob& job, Duration time, std::set<int> alive) {
  for (Duration passed{}; passed < time; passed += milliseconds(50)) {
    job.advance(milliseconds(50));
    for (const int peer : alive) job.say(peer, frame_of(FrameKind::pong));
  }
}

TEST(Heartbeat, ASilentNeighbourIsNamed) {
  ScriptedJob job(4, 0);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  beat(job, seconds(10), {1, 3});
  EXPECT_TRUE(job.fabric->death_of(2).ok())
      << "not a neighbour in the ring, and nothing is wanted of it";
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  beat(job, seconds(9), {3});
  EXPECT_TRUE(job.fabric->death_of(1).ok()) << "within the limit";
  beat(job, seconds(2), {3});
  const Status death = job.fabric->death_of(1);
  ASSERT_EQ(death.code(), Code::peer_failed);
  EXPECT_NE(death.message().find("rank 1 has not answered for"), std::string::npos)
      << death.message();
  EXPECT_EQ(frames_of(job.heard(3), FrameKind::rank_failure), 1u);
}

TEST(Heartbeat, WhoeverIsWaitedForIsWatched) {
  ScriptedJob job(4, 0);
  for (const int peer : {1, 2, 3}) job.wire(peer);
  std::string got(1, 'x');
  const TransferRef receive = job.channel().receive(2, 0, writable(got), {});
  beat(job, seconds(9), {1, 3});
  EXPECT_FALSE(receive->done());
  beat(job, seconds(2), {1, 3});
  ASSERT_TRUE(receive->done());
  EXPECT_EQ(receive->status().ranks(), std::vector<int>{2});
}

TEST(Heartbeat, PingsAreAnsweredAndOnlySentWhenIdle) {
  ScriptedJob job(2, 0);
  job.wire(1);
  const auto pings = [&] {
    const auto frames = take_frames(job.wires[1]->from_fabric);
    return std::pair(frames_of(frames, FrameKind::ping), frames_of(frames, FrameKind::pong));
  };
  job.say(1, frame_of(FrameKind::ping));
  EXPECT_EQ(pings().second, 1u);
  beat(job, seconds(5), {1});
  EXPECT_EQ(pings().first, 0u) << "it is heard of all the time";
  job.advance(milliseconds(300));
  EXPECT_EQ(pings().first, 1u);
  EXPECT_EQ(job.net->mailbox.heartbeat.load() > 10, true);
}

// A link that is only full is no silence: a ping waits behind bytes that the peer's kernel
// goes on acknowledging. Once it acknowledges no more, the limits count
TEST(Heartbeat, AFullLinkIsNoSilence) {
  ScriptedJob job(2, 0);
  ScriptedWire& wire = job.wire(1);
  wire.positions = {{1'000'000, 0}, {1'000'000, 0}};
  const auto carry = [&](Duration time, std::uint64_t bytes) {
    for (Duration passed{}; passed < time; passed += milliseconds(50)) {
      wire.positions[1].acknowledged += bytes;
      beat(job, milliseconds(50), {});
    }
  };
  carry(seconds(60), 100);
  EXPECT_EQ(job.silences, std::vector<std::string>{});
  carry(seconds(3), 0);
  EXPECT_EQ(job.silences, std::vector<std::string>{"1 suspected"});
  carry(seconds(8), 0);
  EXPECT_EQ(job.silences, (std::vector<std::string>{"1 suspected", "1 verdict"}));
}

// The kernel of a stopped process acknowledges what it is sent, and that is no answer: the
// process is found as soon after the ping has reached it as if its kernel were silent
TEST(Heartbeat, AcknowledgedBytesAreNoAnswer) {
  constexpr std::uint64_t kStep = 1000;  // bytes of each 50 ms
  for (const std::uint64_t ahead : {0 * kStep, 50 * kStep}) {
    ScriptedJob job(2, 0);
    ScriptedWire& wire = job.wire(1);
    wire.positions.resize(1);
    const auto carry = [&](std::uint64_t steps) {
      for (std::uint64_t step = 0; step < steps; ++step) {
        SendPosition& position = wire.positions.front();
        position.acknowledged += kStep;
        position.written = std::max(position.acknowledged, ahead);
        beat(job, milliseconds(50), {});
      }
    };
    carry(9 * 20);
    EXPECT_TRUE(job.fabric->death_of(1).ok()) << "within the limit";
    carry(2 * 20 + ahead / kStep);
    EXPECT_EQ(job.silences, (std::vector<std::string>{"1 suspected", "1 verdict"}));
  }
}

TEST(Heartbeat, OnesOwnPauseBlamesNobody) {
  ScriptedJob job(2, 0);
  job.wire(1);
  beat(job, seconds(1), {1});
  for (int i = 0; i < 20; ++i) {  // stopped itself, again and again
    job.advance(seconds(20));
    job.say(1, frame_of(FrameKind::pong));
  }
  for (int i = 0; i < 2; ++i) job.advance(seconds(20));
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  beat(job, seconds(9), {});
  EXPECT_TRUE(job.fabric->death_of(1).ok()) << "it waits the whole limit again";
  beat(job, seconds(2), {});
  EXPECT_FALSE(job.fabric->death_of(1).ok());
}

TEST(Heartbeat, SilenceIsASuspicionFirst) {
  ScriptedJob job(2, 0);
  job.wire(1);
  beat(job, seconds(2), {});
  EXPECT_EQ(job.silences, std::vector<std::string>{});
  beat(job, seconds(1), {});
  EXPECT_EQ(job.silences, std::vector<std::string>{"1 suspected"});
  beat(job, seconds(6), {});
  job.say(1, frame_of(FrameKind::pong));
  beat(job, seconds(1), {1});
  EXPECT_EQ(job.silences, (std::vector<std::string>{"1 suspected", "1 over"}));
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  beat(job, seconds(11), {});
  EXPECT_EQ(job.silences,
            (std::vector<std::string>{"1 suspected", "1 over", "1 suspected", "1 verdict"}));
  EXPECT_EQ(job.fabric->death_of(1).ranks(), std::vector<int>{1});
}

TEST(Heartbeat, ARankOfThisHostThatRunsIsWaitedForHoweverLong) {
  ScriptedJob job(2, 0, nullptr, {0, 0});
  job.wire(1);
  job.net->processes[1] = ProcessState::running;
  beat(job, seconds(600), {});
  EXPECT_TRUE(job.fabric->death_of(1).ok()) << job.fabric->death_of(1).message();
  EXPECT_EQ(job.silences, std::vector<std::string>{"1 suspected"});
}

TEST(Heartbeat, ARankOfThisHostThatIsStoppedIsNamedWithinThreeSeconds) {
  ScriptedJob job(2, 0, nullptr, {0, 0});
  job.wire(1);
  job.net->processes[1] = ProcessState::stopped;
  beat(job, seconds(2), {});
  EXPECT_TRUE(job.fabric->death_of(1).ok()) << "a short stop is none";
  beat(job, seconds(1), {});
  EXPECT_EQ(job.fabric->death_of(1).ranks(), std::vector<int>{1});
  EXPECT_NE(job.fabric->death_of(1).message().find("its process is stopped"), std::string::npos)
      << job.fabric->death_of(1).message();
}

TEST(Heartbeat, ATracersShortStopsAreNoStop) {
  ScriptedJob job(2, 0, nullptr, {0, 0});
  job.wire(1);
  for (int look = 0; look < 200; ++look) {
    job.net->processes[1] = look % 3 == 0 ? ProcessState::running : ProcessState::stopped;
    beat(job, milliseconds(250), {});
  }
  EXPECT_TRUE(job.fabric->death_of(1).ok()) << job.fabric->death_of(1).message();
}

TEST(Heartbeat, TheLimitOfOtherHostsIsAnOption) {
  for (const Duration limit :
       {Duration(seconds(1)), Duration(muster::testing::kMustHappen), Duration::zero()}) {
    ScriptedJob job(2, 0, nullptr, {}, limit);
    job.wire(1);
    beat(job, limit == Duration::zero() ? seconds(600) : limit - milliseconds(150), {});
    EXPECT_TRUE(job.fabric->death_of(1).ok()) << describe(limit);
    if (limit == Duration::zero()) continue;
    beat(job, seconds(1), {});
    EXPECT_FALSE(job.fabric->death_of(1).ok()) << describe(limit);
  }
}

/// The mailboxes of ranks 0 and 1 of a host, and no memory for groups.
class TwoMailboxes final : public shm::HostRegion {
 public:
  std::span<const int> ranks() const override { return ranks_; }
  int local_rank() const override { return 0; }
  shm::Mailbox& mailbox(int local_rank) override {
    return mailboxes_[static_cast<std::size_t>(local_rank)];
  }
  Result<std::uint64_t> claim(std::size_t) override { return Status(Code::exhausted, "none"); }
  void release(std::uint64_t) override {}
  std::byte* at(std::uint64_t) override { return nullptr; }
  std::byte* arena_at(int, std::uint64_t, std::size_t) override { return nullptr; }
  bool can_read(int) override { return false; }
  bool read(int, std::uint64_t, MutableBytes) override { return false; }

 private:
  std::array<int, 2> ranks_{0, 1};
  std::array<shm::Mailbox, 2> mailboxes_;
};

/// Rank 0 of a host's two, which watches the mailbox of rank 1.
struct MailboxJob {
  explicit MailboxJob(Duration limit = kHeartbeatLimit)
      : job(2, 0, nullptr, {0, 0}, limit, &region) {
    job.net->processes[1] = ProcessState::running;
    beats(seconds(1), true);
  }
  void beats(Duration time, bool peer_beats) {
    for (Duration passed{}; passed < time; passed += milliseconds(50)) {
      if (peer_beats) region.mailbox(1).heartbeat.fetch_add(1);
      job.advance(milliseconds(50));
    }
  }
  bool declared() const { return !job.fabric->death_of(1).ok(); }

  TwoMailboxes region;
  ScriptedJob job;
};

// Ranks of one host are stopped together and go on one after the other: the first to go on
// gives the others the whole limit
TEST(Heartbeat, APauseOfSeveralRanksBlamesNobody) {
  for (const Duration before : {Duration(0), Duration(milliseconds(500)), Duration(seconds(2))}) {
    MailboxJob pair;
    pair.job.net->processes[1] = ProcessState::stopped;
    pair.beats(before, false);
    pair.job.advance(seconds(6));
    pair.beats(seconds(2), false);
    EXPECT_FALSE(pair.declared()) << pair.job.fabric->death_of(1).message();
    pair.job.net->processes[1] = ProcessState::running;
    pair.beats(seconds(5), true);
    EXPECT_FALSE(pair.declared());
    pair.job.net->processes[1] = ProcessState::stopped;
    pair.beats(seconds(3), false);
    EXPECT_TRUE(pair.declared()) << "stopped alone";
  }
}

// A rank that is late at every beat still names the one that is stopped
TEST(Heartbeat, OnesOwnLatenessIsNoReasonForEver) {
  MailboxJob pair;
  pair.job.net->processes[1] = ProcessState::stopped;
  for (int beat = 0; beat < 8; ++beat) pair.job.advance(seconds(1));
  EXPECT_TRUE(pair.declared());
}

// Also one of another host, that no kernel tells of
TEST(Heartbeat, OnesOwnLatenessExcusesNoOtherHostForEver) {
  ScriptedJob job(2, 0);
  job.wire(1);
  beat(job, seconds(1), {1});
  for (int beat = 0; beat < 30; ++beat) job.advance(seconds(1));
  EXPECT_EQ(job.fabric->death_of(1).ranks(), std::vector<int>{1});
}

// A limit of 0 for the silence of other hosts leaves what the kernel says of this one's
TEST(Heartbeat, NoLimitForOthersLeavesTheKernelsVerdict) {
  MailboxJob pair(Duration::zero());
  pair.beats(seconds(600), false);
  EXPECT_FALSE(pair.declared()) << "it runs";
  pair.job.net->processes[1] = ProcessState::stopped;
  pair.beats(seconds(3), false);
  EXPECT_TRUE(pair.declared());
  ScriptedJob linked(2, 0, nullptr, {0, 0}, Duration::zero());
  linked.wire(1);
  linked.net->processes[1] = ProcessState::stopped;
  beat(linked, seconds(3), {});
  EXPECT_EQ(linked.fabric->death_of(1).ranks(), std::vector<int>{1});
}

// All that is said of a suspected rank is true: one of this host that is stopped does not wait
// for the limit of others
TEST(Heartbeat, ASuspicionSaysWhatFollows) {
  ::testing::internal::CaptureStderr();
  MailboxJob pair;
  pair.beats(milliseconds(2250), false);
  pair.job.net->processes[1] = ProcessState::stopped;
  pair.beats(milliseconds(600), false);
  ScriptedJob far(2, 0, nullptr, {}, Duration::zero());
  far.wire(1);
  beat(far, seconds(4), {});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("counts as failed after"), std::string::npos) << said;
  EXPECT_NE(said.find("its process is stopped"), std::string::npos) << said;
  EXPECT_NE(said.find("it is waited for, as heartbeat_timeout is 0"), std::string::npos) << said;
}

TEST(Heartbeat, ADebuggerMayHoldAPeer) {
  ScriptedJob job(2, 0);
  job.wire(1);
  job.fabric->suspend_heartbeats(true);
  job.fabric->suspend_heartbeats(true);
  job.fabric->suspend_heartbeats(false);
  beat(job, muster::testing::kMustHappen, {});
  EXPECT_TRUE(job.fabric->death_of(1).ok());
  job.fabric->suspend_heartbeats(false);
  beat(job, seconds(12), {});
  EXPECT_FALSE(job.fabric->death_of(1).ok());
}

TEST(Heartbeat, LooksAtTheNextInTheRingAfterADeath) {
  ScriptedJob job(4, 0);
  job.wire(1);
  job.settle();
  job.net->connects.clear();
  job.net->news.push_back([](ConnectorEvents& events) {
    events.on_death(1, Status(Code::peer_failed, "rank 1 was killed", {1}));
  });
  job.settle();
  job.advance(milliseconds(300));
  EXPECT_EQ(job.net->connects[2], 1) << "rank 2 is the neighbour now";
}

}  // namespace
}  // namespace muster::transport
