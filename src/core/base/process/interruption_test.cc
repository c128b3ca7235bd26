// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/interruption.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

using Binding = Interruption::InterruptionBinding;

// A wait that has its own reason to end keeps that of its caller
TEST(Interruption, OuterOnesStayInForce) {
  const auto caller = std::make_shared<Interruption>(), own = std::make_shared<Interruption>();
  EXPECT_TRUE(Interruption::of_thread().ok());
  EXPECT_EQ(Interruption::look_every(), Duration::max());
  const Binding outer(caller);
  {
    const Binding inner(own);
    EXPECT_TRUE(Interruption::of_thread().ok());
    EXPECT_LT(Interruption::look_every(), Duration::max());
    caller->raise("Ctrl-C");
    EXPECT_EQ(Interruption::of_thread().message(), "the wait was given up: Ctrl-C");
    own->raise("another epoch");
    own->raise("one more");
    EXPECT_EQ(Interruption::of_thread().message(), "the wait was given up: another epoch");
  }
  EXPECT_EQ(Interruption::of_thread().code(), Code::aborted);
}

}  // namespace
}  // namespace muster
