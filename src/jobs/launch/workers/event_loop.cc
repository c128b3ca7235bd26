// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/event_loop.h"

#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "core/base/descriptor.h"

namespace muster::launch {

Status Wakeups::open(std::uint64_t timer_data) {
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!epoll_ || !timer_)
    return Status(Code::exhausted, "no descriptor to wait for events: " + errno_text(errno));
  watch(timer_.get(), timer_data);
  return failure_;
}

void Wakeups::fail(const char* what) {
  if (!failure_) return;
  failure_ = Status(Code::exhausted,
                    std::string("the launcher cannot wait for its workers: ") + what + ": " +
                        errno_text(errno) +
                        "; look at free memory and at fs.epoll.max_user_watches (sysctl)");
}

void Wakeups::watch(int fd, std::uint64_t data) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = data;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail("watching a descriptor");
}

void Wakeups::forget(int fd) {
  // Fails only where `watch` has failed.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Result<int> Wakeups::wait(std::span<epoll_event> ready) {
  if (!failure_) return failure_;
  const int count = ::epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), -1);
  if (count >= 0) return count;
  if (errno == EINTR) return 0;
  fail("waiting for events");
  return failure_;
}

void Wakeups::take_timer() {
  std::uint64_t times = 0;
  // Without an expiration there is nothing to take.
  [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &times, sizeof times);
  armed_ = TimePoint::max();
}

void Wakeups::arm_timer(TimePoint at) {
  if (at == armed_) return;
  armed_ = at;
  itimerspec when{};
  if (armed_ != TimePoint::max()) {
    const auto since = std::max(armed_.time_since_epoch(), Duration(1));
    when.it_value.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(since).count();
    when.it_value.tv_nsec = (since % std::chrono::seconds(1)).count();
  }
  if (::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0)
    fail("setting a timer");
}

namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Result<SignalWatch> SignalWatch::open(std::set<int> signals) {
  signals.insert({SIGUSR1, SIGUSR2});
  sigset_t taken;
  sigemptyset(&taken);
  for (int signal : signals) {
    if (signal != SIGHUP || !is_ignored(signal)) sigaddset(&taken, signal);
  }
  SignalWatch watch;
  watch.descriptor_.reset(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!watch.descriptor_)
    return Status(Code::exhausted, "no signal descriptor: " + errno_text(errno));
  ::pthread_sigmask(SIG_BLOCK, &taken, &watch.previous_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &watch.previous_pipe_);
  return watch;
}

SignalWatch::~SignalWatch() {
  if (!descriptor_) return;
  ::sigaction(SIGPIPE, &previous_pipe_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

std::vector<int> SignalWatch::take() {
  std::vector<int> signals;
  signalfd_siginfo info{};
  while (::read(descriptor_.get(), &info, sizeof info) == sizeof info)
    signals.push_back(static_cast<int>(info.ssi_signo));
  return signals;
}

}  // namespace muster::launch
