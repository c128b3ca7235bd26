#include "muster/base/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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

}  // namespace
}  // namespace muster
