// Silence: suspicion, verdict and what the kernel says, on a hand-moved clock.
#include <gtest/gtest.h>

#include <set>

#include "muster/testing/limits.h"
#include "muster/transport/testing/loopback_job.h"
#include "muster/transport/testing/scripted_job.h"

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

TEST(Heartbeat, OnesOwnPauseBlamesNobody) {
  ScriptedJob job(2, 0);
  job.wire(1);
  beat(job, seconds(1), {1});
  for (int i = 0; i < 20; ++i) job.advance(seconds(10));  // stopped itself, again and again
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
