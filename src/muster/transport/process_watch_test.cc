#include "muster/transport/process_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/base/process_start.h"
#include "muster/testing/process_usage.h"

namespace muster::transport {
namespace {

using std::chrono::seconds;

/// A child that waits to be killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    EXPECT_GE(pid_, 0);
    if (pid_ == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (pid_ == 0) ::pause();
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::uint32_t pid() const { return static_cast<std::uint32_t>(pid_); }

 private:
  pid_t pid_;
};

class Watching : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(watch.open().ok()); }
  /// What is told of rank 7 by a look at `now`.
  std::optional<ProcessWatch::Seen> look(TimePoint now) {
    std::optional<ProcessWatch::Seen> seen;
    watch.poll(now, [&](int rank, ProcessWatch::Seen what) {
      EXPECT_EQ(rank, 7);
      seen = what;
    });
    return seen;
  }
  /// Until something is told.
  std::optional<ProcessWatch::Seen> await(TimePoint now) {
    std::optional<ProcessWatch::Seen> seen;
    for (const TimePoint end = steady_clock().now() + seconds(60); !seen && steady_clock().now() < end;) seen = look(now);
    return seen;
  }

  ProcessWatch watch;
  Child child;
  const TimePoint now{seconds(100)};
};

TEST_F(Watching, TellsTheEndOfAProcess) {
  watch.watch(7, child.pid(), process_start(child.pid()).value(), now);
  EXPECT_EQ(look(now - seconds(1)), std::nullopt);
  EXPECT_EQ(look(now), std::nullopt);
  child.kill();
  EXPECT_EQ(await(now), ProcessWatch::Seen::ended);
}

TEST_F(Watching, TellsThatAProcessIsGoneOrAnotherHasItsNumber) {
  const auto pid = child.pid();
  watch.watch(7, pid, process_start(pid).value() + 1, now);
  EXPECT_EQ(look(now), ProcessWatch::Seen::gone);
  watch.watch(7, pid, process_start(pid).value(), now);
  child.kill();
  EXPECT_EQ(look(now), ProcessWatch::Seen::gone);
  EXPECT_EQ(process_start(pid), 0u);
}

// spec: A1 no file descriptors left: nobody is taken for dead for the want of one
TEST_F(Watching, WithoutDescriptorsLooksAgainLater) {
  const std::uint64_t start = process_start(child.pid()).value();
  const testing::DescriptorLimit few(256);
  for (const int left : {0, 1}) {
    std::vector<Descriptor> held;
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) held.emplace_back(fd);
    ASSERT_EQ(errno, EMFILE);
    for (int i = 0; i < left; ++i) held.pop_back();
    watch.watch(7, child.pid(), start, now);
    EXPECT_EQ(look(now), std::nullopt) << left << " left";
    EXPECT_GT(watch.next_timer(), now) << left << " left";
    EXPECT_EQ(look(watch.next_timer()), std::nullopt) << "still none";
    EXPECT_LT(watch.next_timer(), TimePoint::max());
    held.clear();
    EXPECT_EQ(look(watch.next_timer()), std::nullopt);
    EXPECT_EQ(watch.next_timer(), TimePoint::max()) << "it is watched";
  }
  child.kill();
  EXPECT_EQ(await(now), ProcessWatch::Seen::ended);
}

}  // namespace
}  // namespace muster::transport
