/// The agent's event loop: descriptors and one timer.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>

#include "muster/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

class Wakeups {
 public:
  /// `timer_data` is what the timer's events carry.
  Status open(std::uint64_t timer_data);
  void watch(int fd, bool writable, std::uint64_t data);
  void forget(int fd);
  /// Blocks until something is ready; the number of events.
  int wait(std::span<epoll_event> ready);

  /// Once at `at`; max: never.
  void arm_timer(TimePoint at);
  /// The timer's event has come.
  void take_timer();

 private:
  Descriptor epoll_, timer_;
  TimePoint armed_ = TimePoint::max();
};

}  // namespace muster::launch
