#include "core/base/time/quick_clock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

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

}  // namespace
}  // namespace muster
