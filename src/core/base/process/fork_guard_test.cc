// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <mutex>
#include <thread>

namespace muster {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST(ForkGuard, ForkedChildLosesGuardedDescriptorsAndKnowsWhatItIs) {
  GuardedDescriptor guarded(Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
  GuardedDescriptor moved = std::move(guarded);
  const Descriptor plain(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const ProcessMark mark;
  EXPECT_FALSE(mark.forked());
  const pid_t child = ::fork();
  if (child == 0) {
    bool ok = mark.forked() && !is_open(moved.get()) && is_open(plain.get());
    // The number now belongs to somebody else, whom the end of the parent's object must not touch.
    const Descriptor other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    ok = ok && other.get() == moved.get();
    moved.reset();
    ok = ok && is_open(other.get()) && !ProcessMark().forked();
    ::_exit(ok ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(is_open(moved.get()));
  const int number = moved.get();
  moved.reset();
  EXPECT_FALSE(is_open(number));
}

// A lock that another thread of the parent holds does not stop a forked child.
TEST(ForkGuard, AForkedChildHasAnOwnObject) {
  struct Guarded {
    std::mutex mutex;
    int value = 0;
  };
  static constinit PerProcess<Guarded> one;
  one.get().value = 7;
  std::promise<void> locked, forked;
  std::thread other([&] {
    const std::lock_guard lock(one.get().mutex);
    locked.set_value();
    forked.get_future().wait();
  });
  locked.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    Guarded& own = one.get();
    ::_exit(own.mutex.try_lock() && own.value == 0 && &one.get() == &own ? 0 : 1);
  }
  forked.set_value();
  int status = -1;
  ::waitpid(child, &status, 0);
  other.join();
  EXPECT_EQ(status, 0);
  EXPECT_EQ(one.get().value, 7);
}

}  // namespace
}  // namespace muster
