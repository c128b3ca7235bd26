/// The agent's event loop: descriptors and one timer.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>

#include "core/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

/// What the system refuses to watch would never be heard of: the first such failure is what every
/// later `wait` returns.
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

}  // namespace muster::launch
