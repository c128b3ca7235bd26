// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/failure/process_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/process_start.h"
#include "testing/limits.h"
#include "testing/process_usage.h"
#include "testing/rank_processes.h"

namespace muster::transport {
namespace {

using std::chrono::seconds;

class Watching : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(watch.open().ok()); }
  /// The news of rank 7 that a look at `now` tells.
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
    for (const TimePoint end = steady_clock().now() + muster::testing::kMustHappen;
         !seen && steady_clock().now() < end;)
      seen = look(now);
    return seen;
  }

  std::uint32_t pid() const { return static_cast<std::uint32_t>(other.pid(0)); }
  std::uint64_t start() const { return process_start(pid()).value(); }
  /// And takes its end, so that nobody has its number any more.
  void kill_other() {
    other.kill(0, SIGKILL);
    other.join(muster::testing::kMustHappen);
  }

  ProcessWatch watch;
  testing::RankProcesses other{1, [](int) {
                                 for (;;) ::pause();
                                 return std::string();
                               }};
  const TimePoint now{seconds(100)};
};

TEST_F(Watching, TellsTheEndOfAProcess) {
  watch.watch(7, pid(), start(), now);
  EXPECT_EQ(look(now - seconds(1)), std::nullopt);
  EXPECT_EQ(look(now), std::nullopt);
  kill_other();
  EXPECT_EQ(await(now), ProcessWatch::Seen::ended);
}

TEST_F(Watching, TellsThatAProcessIsGoneOrAnotherHasItsNumber) {
  watch.watch(7, pid(), start() + 1, now);
  EXPECT_EQ(look(now), ProcessWatch::Seen::gone);
  const std::uint32_t number = pid();
  watch.watch(7, number, start(), now);
  kill_other();
  EXPECT_EQ(look(now), ProcessWatch::Seen::gone);
  EXPECT_EQ(process_start(number), 0u);
}

// spec: A1 no file descriptors left: nobody is taken for dead for the want of one
TEST_F(Watching, WithoutDescriptorsLooksAgainLater) {
  const std::uint64_t began = start();
  const testing::DescriptorLimit few(256);
  for (const int left : {0, 1}) {
    std::vector<Descriptor> held;
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) held.emplace_back(fd);
    ASSERT_EQ(errno, EMFILE);
    for (int i = 0; i < left; ++i) held.pop_back();
    watch.watch(7, pid(), began, now);
    EXPECT_EQ(look(now), std::nullopt) << left << " left";
    EXPECT_GT(watch.next_timer(), now) << left << " left";
    EXPECT_EQ(look(watch.next_timer()), std::nullopt) << "still none";
    EXPECT_LT(watch.next_timer(), TimePoint::max());
    held.clear();
    EXPECT_EQ(look(watch.next_timer()), std::nullopt);
    EXPECT_EQ(watch.next_timer(), TimePoint::max()) << "it is watched";
  }
  kill_other();
  EXPECT_EQ(await(now), ProcessWatch::Seen::ended);
}

// Asked instead: a process that is stopped is there, one that is killed is gone before anybody has
// waited for it.
TEST_F(Watching, ProcessEndTellsAnEndedProcessFromAStoppedOne) {
  shm::ProcessEnd asked_before(pid(), start()), asked_after(pid(), start()),
      another(pid(), start() + 1);
  EXPECT_TRUE(another.seen()) << "its number is another process's";
  other.kill(0, SIGSTOP);
  EXPECT_FALSE(asked_before.seen());
  other.kill(0, SIGKILL);
  for (const TimePoint end = steady_clock().now() + muster::testing::kMustHappen;
       !asked_before.seen() && steady_clock().now() < end;)
    std::this_thread::yield();
  EXPECT_TRUE(asked_before.seen());
  EXPECT_TRUE(asked_after.seen()) << "nobody has waited for it yet";
  const std::uint64_t began = start();
  kill_other();
  EXPECT_TRUE(shm::ProcessEnd(pid(), began).seen());
}

}  // namespace
}  // namespace muster::transport
