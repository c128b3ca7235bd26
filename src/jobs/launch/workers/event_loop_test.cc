// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "jobs/launch/workers/event_loop.h"

namespace muster::launch {
namespace {

/// By value: the kernel's structure is packed.
std::uint64_t number_of(const epoll_event& event) { return event.data.u64; }

// spec: J3 what happens to a watched descriptor is told, and the timer
TEST(Wakeups, TellWhatIsReady) {
  Wakeups wakeups;
  ASSERT_TRUE(wakeups.open(1).ok());
  const Descriptor event(::eventfd(1, EFD_CLOEXEC));
  wakeups.watch(event.get(), 2);
  epoll_event ready[4];
  auto count = wakeups.wait(ready);
  ASSERT_TRUE(count.ok()) << count.status().message();
  ASSERT_EQ(*count, 1);
  EXPECT_EQ(number_of(ready[0]), 2U);
  wakeups.forget(event.get());
  wakeups.arm_timer(steady_clock().now());
  count = wakeups.wait(ready);
  ASSERT_TRUE(count.ok()) << count.status().message();
  ASSERT_EQ(*count, 1);
  EXPECT_EQ(number_of(ready[0]), 1U);
}

// spec: J3 a descriptor that the system does not watch is an error by name, not a wait without end
TEST(Wakeups, ADescriptorThatCannotBeWatchedEndsTheWait) {
  Wakeups wakeups;
  ASSERT_TRUE(wakeups.open(1).ok());
  const Descriptor file(
      ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));  // the system refuses files
  ASSERT_TRUE(static_cast<bool>(file));
  wakeups.watch(file.get(), 2);
  epoll_event ready[4];
  for (int i = 0; i < 2; ++i) {
    const auto count = wakeups.wait(ready);
    ASSERT_FALSE(count.ok());
    EXPECT_EQ(count.status().code(), Code::exhausted);
    EXPECT_NE(count.status().message().find("watching a descriptor"), std::string::npos)
        << count.status().message();
  }
}

}  // namespace

}  // namespace muster::launch
