#include "muster/launch/wakeups.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "muster/base/socket_address.h"

namespace muster::launch {

Status Wakeups::open(std::uint64_t timer_data) {
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!epoll_ || !timer_)
    return Status(Code::exhausted, "no descriptor to wait for events: " + errno_text(errno));
  watch(timer_.get(), false, timer_data);
  return {};
}

void Wakeups::watch(int fd, bool writable, std::uint64_t data) {
  epoll_event event{};
  event.events = writable ? EPOLLOUT : EPOLLIN;
  event.data.u64 = data;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
}

void Wakeups::forget(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

int Wakeups::wait(std::span<epoll_event> ready) {
  return ::epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), -1);
}

void Wakeups::take_timer() {
  std::uint64_t times = 0;
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
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

}  // namespace muster::launch
