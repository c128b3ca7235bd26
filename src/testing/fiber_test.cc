// SPDX-License-Identifier: BSD-3-Clause
#include "testing/fiber.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace muster::testing {
namespace {

TEST(Fiber, RunsInTurnsAndEnds) {
  std::string order;
  Fiber a([&] {
    order += "a";
    Fiber::yield();
    order += "A";
  });
  Fiber b([&] { order += "b"; });
  EXPECT_FALSE(a.resume());
  EXPECT_TRUE(b.resume());
  EXPECT_TRUE(a.resume());
  EXPECT_EQ(order, "abA");
  EXPECT_EQ(Fiber::current(), nullptr);
}

}  // namespace
}  // namespace muster::testing
