#include "core/wait/hardware_threads.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <thread>

namespace muster {
namespace {

TEST(HardwareThreads, AreToldInOrderAndEachOnce) {
  const auto numbers = own_hardware_threads();
  ASSERT_FALSE(numbers.empty());
  EXPECT_TRUE(std::ranges::is_sorted(numbers));
  EXPECT_EQ(std::ranges::adjacent_find(numbers), numbers.end());
  EXPECT_TRUE(std::ranges::count(numbers, ::sched_getcpu()) == 1);
}

TEST(HardwareThreads, HoldTheThreadThatIsBoundToOneAndNoOther) {
  const auto all = own_hardware_threads();
  for (const int number : all) {
    std::thread([number] {
      const Status bound = bind_to_hardware_thread(number);
      ASSERT_TRUE(bound) << bound.message();
      EXPECT_EQ(own_hardware_threads(), std::vector<int>{number});
      EXPECT_EQ(::sched_getcpu(), number);
    }).join();
  }
  EXPECT_EQ(own_hardware_threads(), all);
}

TEST(HardwareThreads, ThatAreNotThereAreRefused) {
  const auto all = own_hardware_threads();
  for (const int number : {-1, 8191, 8192, 1 << 20}) {
    const Status bound = bind_to_hardware_thread(number);
    EXPECT_EQ(bound.code(), Code::invalid_argument);
    EXPECT_NE(bound.message().find(std::to_string(number)), std::string::npos) << bound.message();
  }
  EXPECT_EQ(own_hardware_threads(), all);
}

}  // namespace
}  // namespace muster
