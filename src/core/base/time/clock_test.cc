// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <chrono>

#include "core/base/time/clock.h"

namespace muster {
namespace {

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
