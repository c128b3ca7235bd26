// SPDX-License-Identifier: BSD-3-Clause
#include "testing/rank_processes.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>

namespace muster::testing {
namespace {

void write_all(int fd, const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t wrote = ::write(fd, text.data() + at, text.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    at += static_cast<std::size_t>(wrote);
  }
}

}  // namespace

RankProcesses::RankProcesses(int count, const std::function<std::string(int)>& body) {
  for (int rank = 0; rank < count; ++rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid < 0) std::abort();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      children_.clear();
      ::close(ends[0]);
      write_all(ends[1], body(rank));
      ::close(ends[1]);
      std::fflush(nullptr);
      ::_exit(0);
    }
    ::close(ends[1]);
    children_.push_back({pid, Descriptor(ends[0]), std::nullopt});
  }
}

RankProcesses::~RankProcesses() {
  for (Child& child : children_) {
    if (child.end) continue;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
  }
}

void RankProcesses::kill(int rank, int signal) { ::kill(pid(rank), signal); }

std::vector<RankEnd> RankProcesses::join(Duration limit) {
  const TimePoint deadline = deadline_after(steady_clock(), limit);
  std::vector<RankEnd> ends;
  for (Child& child : children_) {
    if (child.end) continue;
    // The report ends when the child ends: reading it to its end is waiting for the child. A
    // grandchild that holds the pipe (a forked loader) must not hold us up, so that the child's own
    // end counts too.
    const int process = static_cast<int>(::syscall(SYS_pidfd_open, child.pid, 0));
    RankEnd end;
    bool gone = false;
    while (!gone) {
      const int left = poll_milliseconds(steady_clock().now(), deadline);
      pollfd waits[2] = {{child.report.get(), POLLIN, 0}, {process, POLLIN, 0}};
      if (left == 0 || ::poll(waits, 2, left) == 0) {
        end.killed_at_the_limit = true;
        ::kill(child.pid, SIGKILL);
        break;
      }
      char buffer[4096];
      if ((waits[0].revents & (POLLIN | POLLHUP)) != 0) {
        const ssize_t got = ::read(child.report.get(), buffer, sizeof buffer);
        if (got > 0) {
          end.report.append(buffer, static_cast<std::size_t>(got));
          continue;
        }
        if (got == 0) child.report.reset();
      }
      gone = (waits[1].revents & POLLIN) != 0;
    }
    ::close(process);
    ::waitpid(child.pid, &end.wait_status, 0);
    child.end = end;
  }
  for (const Child& child : children_) ends.push_back(*child.end);
  return ends;
}

struct SharedCounter::Shared {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::int64_t> stamp{0};
};

SharedCounter::SharedCounter() {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  shared_ = new (memory) Shared;
}

SharedCounter::~SharedCounter() { ::munmap(shared_, sizeof(Shared)); }

void SharedCounter::add(int amount) {
  shared_->value.fetch_add(static_cast<std::uint32_t>(amount));
  ::syscall(SYS_futex, &shared_->value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int SharedCounter::value() const { return static_cast<int>(shared_->value.load()); }

bool SharedCounter::wait_for(int value, Duration limit) {
  const TimePoint deadline = deadline_after(steady_clock(), limit);
  for (;;) {
    const std::uint32_t now = shared_->value.load();
    if (static_cast<int>(now) >= value) return true;
    const auto left = (deadline - steady_clock().now()).count();
    if (left <= 0) return false;
    const timespec span{static_cast<time_t>(left / 1'000'000'000),
                        static_cast<long>(left % 1'000'000'000)};
    ::syscall(SYS_futex, &shared_->value, FUTEX_WAIT, now, &span, nullptr, 0);
  }
}

void SharedCounter::stamp(TimePoint at) { shared_->stamp.store(at.time_since_epoch().count()); }

TimePoint SharedCounter::stamped() const { return TimePoint(Duration(shared_->stamp.load())); }

}  // namespace muster::testing
