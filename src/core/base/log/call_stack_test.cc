// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/call_stack.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

[[gnu::noinline]] CallStack stack_of_a_hidden_function() {
  auto stack = CallStack::here();
  asm volatile("" ::: "memory");  // no tail call
  return stack;
}

// spec: H6 stacks name functions, hidden ones too, as C++ spells them, with the file and the offset
TEST(CallStack, NamesFunctions) {
  const auto text = stack_of_a_hidden_function().text();
  EXPECT_EQ(text.find("  #0 muster::(anonymous namespace)::stack_of_a_hidden_function() ("), 0U)
      << text;
  EXPECT_NE(text.find("NamesFunctions_Test::TestBody() (muster_base_test+0x"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("unknown"), std::string::npos) << text;
  EXPECT_EQ(text.back(), '\n');
}

// spec: H6 a stack begins where its caller wants it to
TEST(CallStack, LeavesOutTheInnermostFrames) {
  const auto text = CallStack::here(1).text();
  EXPECT_EQ(text.find("TestBody"), std::string::npos) << text;
  EXPECT_NE(text.find("testing::"), std::string::npos) << text;
}

}  // namespace
}  // namespace muster
