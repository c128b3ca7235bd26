// SPDX-License-Identifier: BSD-3-Clause
/// The launcher's event loop: descriptors, one timer, and signals as events of a descriptor.
#pragma once

#include <signal.h>
#include <sys/epoll.h>

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

/// An epoll set with a timer. Events of a descriptor that epoll refused would be lost silently, so
/// the first such failure is kept and every later `wait` returns it. One thread at a time.
class Wakeups {
 public:
  /// `timer_data` is what the timer's events carry.
  Status open(std::uint64_t timer_data);
  /// Until `fd` is readable.
  void watch(int fd, std::uint64_t data);
  void forget(int fd);
  /// Blocks until something is ready, or a signal's handler has run (0); the number of events.
  Result<int> wait(std::span<epoll_event> ready);

  /// Once at `at`; max: never.
  void arm_timer(TimePoint at);
  /// The timer's event has come.
  void take_timer();

 private:
  void fail(const char* what);

  Descriptor epoll_, timer_;
  Status failure_;
  TimePoint armed_ = TimePoint::max();
};

/// Takes over `signals` (SIGHUP not if it was ignored, as under nohup), SIGUSR1 and SIGUSR2 for
/// this thread and those it starts from now on, and ignores SIGPIPE. Undone at the end.
class SignalWatch {
 public:
  static Result<SignalWatch> open(std::set<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT});
  SignalWatch(SignalWatch&&) = default;
  ~SignalWatch();

  int descriptor() const { return descriptor_.get(); }
  /// Those that came, in order.
  std::vector<int> take();
  /// The mask as it was before, for workers.
  const sigset_t& previous_mask() const { return previous_; }

 private:
  SignalWatch() = default;
  Descriptor descriptor_;
  sigset_t previous_{};
  struct sigaction previous_pipe_ {};
};

}  // namespace muster::launch
