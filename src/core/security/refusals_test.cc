// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "core/security/refusals.h"

namespace muster {
namespace {

// spec: W1 refusals are counted, and logged once a second at most
TEST(Refusals, OneLineASecond) {
  RefusalCount refusals;
  const TimePoint begin{};
  EXPECT_EQ(refusals.note("first", begin), "first");
  for (int i = 0; i < 1000; ++i)
    EXPECT_FALSE(refusals.note("flood", begin + std::chrono::milliseconds(i * 999 / 1000)));
  const auto next = refusals.note("next", begin + std::chrono::seconds(1));
  ASSERT_TRUE(next.has_value());
  EXPECT_NE(next->find("next (and 1000 more"), std::string::npos) << *next;
  EXPECT_EQ(refusals.note("later", begin + std::chrono::seconds(3)), "later");
  EXPECT_EQ(refusals.count(), 1003u);
}

}  // namespace
}  // namespace muster
