#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/base/time/clock.h"

namespace muster {
namespace {

// Long enough to go by the counter, and to hold it against the clock several times.
TEST(QuickClock, IsNeverFarFromTheClock) {
  constexpr Duration kOff = std::chrono::milliseconds(1), kLong = std::chrono::milliseconds(60);
  const auto compare = [&] {
    for (const TimePoint end = steady_clock().now() + kLong; steady_clock().now() < end;) {
      const TimePoint before = steady_clock().now(), quick = quick_now(),
                      after = steady_clock().now();
      ASSERT_GE(quick, before - kOff);
      ASSERT_LE(quick, after + kOff);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(compare);
  for (auto& thread : threads) thread.join();
}

using std::chrono::milliseconds;
using std::chrono::seconds;

// spec: L14 a deadline that is noticed late is put off, but not for ever
TEST(OwnPauses, PutADeadlineOffSoOften) {
  OwnPauses pauses;
  EXPECT_FALSE(pauses.excuse(milliseconds(1000), seconds(1))) << "a process that runs";
  for (int pause = 0; pause < kExcusedPauses; ++pause)
    EXPECT_TRUE(pauses.excuse(milliseconds(1001), seconds(1))) << pause;
  EXPECT_FALSE(pauses.excuse(seconds(40), seconds(1)));
  EXPECT_FALSE(pauses.excuse());
  pauses.reset();
  EXPECT_TRUE(pauses.excuse());
}

}  // namespace
}  // namespace muster
