// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/link_probe.h"

#include <gtest/gtest.h>

#include <chrono>

namespace muster::cli {
namespace {

using std::chrono::milliseconds;

// spec: X4.links over a long way no block counts whose time is that of round trips
TEST(LinkProbe, LongWaysNeedLargerBlocks) {
  EXPECT_TRUE(tells_rate(milliseconds(300), milliseconds(1)));
  EXPECT_FALSE(tells_rate(milliseconds(299), milliseconds(1)));
  EXPECT_FALSE(tells_rate(milliseconds(500), milliseconds(100)));
  EXPECT_TRUE(tells_rate(milliseconds(800), milliseconds(100)));
}

}  // namespace
}  // namespace muster::cli
