// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/stopped_workers.h"

#include <gtest/gtest.h>

namespace muster::launch {
namespace {

using std::chrono::seconds;
using Ranks = std::vector<int>;

// spec: L14.rank a worker that stands still is ended after its limit, not before, and one that goes
// on never is
TEST(StoppedWorkers, OneThatStaysStoppedIsEnded) {
  StoppedWorkers stopped(seconds(8));
  EXPECT_EQ(stopped.next(), TimePoint::max());
  TimePoint now{seconds(1000)};
  stopped.begin(now);
  for (int second = 1; second <= 8; ++second) {
    now += seconds(1);
    EXPECT_EQ(stopped.next(), now);
    const bool pauses = second != 4;  // worker 1 goes on for one check
    EXPECT_EQ(stopped.look(now, pauses ? std::set<int>{1, 2} : std::set<int>{2}), Ranks{});
  }
  now += seconds(1);
  EXPECT_EQ(stopped.look(now, {1, 2}), Ranks{2});
  EXPECT_EQ(stopped.next(), now + seconds(1)) << "worker 1 stands still";
  EXPECT_EQ(stopped.look(now + seconds(1), {}), Ranks{});
  EXPECT_EQ(stopped.next(), TimePoint::max());
}

}  // namespace
}  // namespace muster::launch
