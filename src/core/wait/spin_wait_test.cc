// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <atomic>

#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster {
namespace {

using std::chrono::microseconds;

class SpinWaits : public ::testing::Test {
 protected:
  void SetUp() override {
    take_wakeup();
    take_progress();
  }
  auto now() {
    return [this] {
      ++asked_;
      return TimePoint(time_);
    };
  }
  int polls_until_over(SpinWait& spin, int most = 10'000) {
    int polls = 0;
    while (polls < most && spin.pause(now())) ++polls;
    return polls;
  }

  Duration time_ = std::chrono::seconds(1);
  int asked_ = 0;
};

TEST_F(SpinWaits, CountsPausesWithoutReadingTheClock) {
  SpinWait spin({.pauses = 7});
  EXPECT_EQ(polls_until_over(spin), 7);
  EXPECT_FALSE(spin.pause(now()));
  EXPECT_EQ(asked_, 0);
  spin.restart();
  EXPECT_EQ(polls_until_over(spin), 7);
}

TEST_F(SpinWaits, CountsSeveralPausesForOnePoll) {
  SpinWait spin({.pauses = 16});
  int polls = 0;
  while (spin.pause(now(), 8)) ++polls;
  EXPECT_EQ(polls, 2);
}

TEST_F(SpinWaits, SpinsThenYieldsByTheTimeSinceTheFirstPoll) {
  SpinWait spin(
      {.pauses = SpinBudget::kNoLimit, .spin = microseconds(40), .yield = microseconds(1000)});
  EXPECT_TRUE(spin.pause(now()));
  time_ += microseconds(39);
  EXPECT_TRUE(spin.pause(now()));
  time_ += microseconds(960);
  EXPECT_TRUE(spin.pause(now()));
  time_ += microseconds(1);
  EXPECT_FALSE(spin.pause(now()));
  spin.restart();
  EXPECT_TRUE(spin.pause(now()));
  spin.finish();
  EXPECT_FALSE(spin.pause(now()));
}

TEST_F(SpinWaits, KeepsASharedCoreForItsPauses) {
  SpinWait spin({.yield = microseconds(100), .pauses_on_shared = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(spin.pause(now(), 1, true));
  EXPECT_EQ(asked_, 0);
  EXPECT_TRUE(spin.pause(now(), 1, true));
  EXPECT_EQ(asked_, 1) << "given away";
  EXPECT_TRUE(spin.pause(now(), 1, true));
  EXPECT_EQ(asked_, 1) << "kept anew";
  spin.keep_core_anew();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(spin.pause(now(), 1, true));
  EXPECT_EQ(asked_, 1);
  time_ += microseconds(100);
  EXPECT_FALSE(spin.pause(now()));
}

TEST_F(SpinWaits, YieldsFirstAfterAWakeup) {
  note_wakeup();
  SpinWait spin({.pauses = 9});
  EXPECT_TRUE(spin.pause(now(), 8));
  EXPECT_FALSE(take_wakeup());
  EXPECT_TRUE(spin.pause(now(), 8)) << "the yield counts as one pause";
  EXPECT_FALSE(spin.pause(now(), 8));
}

TEST_F(SpinWaits, ConsumesANoteOnce) {
  EXPECT_FALSE(take_progress());
  note_progress();
  EXPECT_TRUE(take_progress());
  EXPECT_FALSE(take_progress());
}

TEST_F(SpinWaits, BudgetsFollowTheTopology) {
  const Topology own(2, 2), shared(6, 2), crowd(100, 2);
  EXPECT_TRUE(own.dedicated());
  EXPECT_EQ(shared.ranks_per_core, 3);
  EXPECT_EQ(shared.rounds(microseconds(100)), microseconds(300));
  EXPECT_EQ(crowd.rounds(microseconds(100)), microseconds(800));
  EXPECT_GT(SpinBudget::before_sleep(own).pauses, 0);
  EXPECT_EQ(SpinBudget::before_sleep(shared).pauses, 0);
  EXPECT_GT(SpinBudget::before_sleep(shared).yield, Duration::zero());
  EXPECT_EQ(SpinBudget::for_peers(own).yield, Duration::zero());
  EXPECT_EQ(SpinBudget::for_peers(shared).pauses, 0);
  EXPECT_EQ(SpinBudget::for_answer().pauses, 0);
}

// An inline call holds the drive lock of its group during this wait
// (docs/internals/collectives.md, "Locks").
TEST_F(SpinWaits, AWaitForPeersIsShortOnEveryTopology) {
  const Tunables& numbers = default_tunables();
  for (const int cores : {1, 2, 8, 64}) {
    for (std::size_t ranks = 1; ranks <= 1024; ranks *= 2) {
      const Topology topology(ranks, cores);
      SpinWait spin(SpinBudget::for_peers(topology));
      const Duration begin = time_;
      int polls = 0;
      while (spin.pause(now())) {
        ++polls;
        time_ += microseconds(1);
      }
      if (topology.dedicated()) {
        EXPECT_LE(polls, numbers.peer_pauses) << ranks << " ranks on " << cores << " cores";
      } else {
        EXPECT_LE(time_ - begin, 8 * numbers.peer_yield) << ranks << " ranks on " << cores;
      }
      EXPECT_LE(polls, 1000);
    }
  }
}

TEST_F(SpinWaits, CoreOfferIsRepeatedUntilThereIsNews) {
  std::atomic<int> polls{CoreOffer::many_polls()};
  CoreOffer offer(polls);
  for (int i = 0; i < 3 * CoreOffer::many_polls(); ++i) offer.polled(false);
  EXPECT_EQ(polls.load(), CoreOffer::many_polls()) << "learned with the news alone";
  offer.polled(true);
  EXPECT_TRUE(polls.load() == CoreOffer::many_polls() || polls.load() == 2) << polls.load();
}

TEST_F(SpinWaits, YieldsUntilItIsDone) {
  int polls = 0;
  yield_until([&] { return ++polls == 5; });
  EXPECT_EQ(polls, 5);
}

}  // namespace
}  // namespace muster
