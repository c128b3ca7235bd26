// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "jobs/launch/workers/process.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class HandMovedClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  TimePoint time{seconds(1000)};
};

// spec: L14.node processes that were told to end have their time where no process stands still
TEST(EndingGrace, EndsWhenItsTimeIsUp) {
  HandMovedClock clock;
  EndingGrace grace(clock, seconds(10));
  EXPECT_EQ(grace.deadline(), clock.time + seconds(10));
  clock.time += seconds(10) - Duration(1);
  EXPECT_FALSE(grace.is_over());
  clock.time += milliseconds(900);
  EXPECT_TRUE(grace.is_over()) << "a busy machine is no pause";
}

// spec: L14.node a parent that stood still kills no process for that time, and those that do not
// end are killed at last
TEST(EndingGrace, APauseOfTheParentIsNoPartOfIt) {
  HandMovedClock clock;
  EndingGrace grace(clock, seconds(10));
  for (int pause = 0; pause < kExcusedPauses; ++pause) {
    clock.time = grace.deadline() + seconds(60);
    EXPECT_FALSE(grace.is_over()) << pause;
    EXPECT_EQ(grace.deadline(), clock.time + seconds(10)) << pause;
  }
  clock.time = grace.deadline() + seconds(60);
  EXPECT_TRUE(grace.is_over());
}

// spec: L14.node without a limit no process is killed
TEST(EndingGrace, WithoutALimitItNeverEnds) {
  HandMovedClock clock;
  EndingGrace grace(clock, Duration(-1));
  clock.time += std::chrono::hours(1000);
  EXPECT_FALSE(grace.is_over());
}

}  // namespace

}  // namespace muster::launch
