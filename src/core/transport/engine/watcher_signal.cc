#include "core/transport/engine/watcher_signal.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "core/net/socket_address.h"

namespace muster::transport {
namespace {

int milliseconds_until(TimePoint now, TimePoint then) {
  if (then == TimePoint::max()) return -1;
  if (then <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(then - now).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

}  // namespace

Status WatcherSignal::open(int news) {
  Descriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  Descriptor kick(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll || !kick)
    return Status(Code::exhausted,
                  "cannot make the descriptors of the link watcher: " + errno_text(errno));
  epoll_ = GuardedDescriptor(std::move(epoll));
  kick_ = GuardedDescriptor(std::move(kick));
  news_ = news;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = kick_.get();
  const bool kicks = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, kick_.get(), &event) == 0;
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = news_;
  armed_.store(true);
  if (!kicks || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, news_, &event) != 0)
    return Status(Code::exhausted,
                  "the link watcher cannot watch its descriptors: " + errno_text(errno));
  return {};
}

void WatcherSignal::kick() {
  if (kicked_.exchange(true)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(kick_.get(), &one, sizeof one);
}

void WatcherSignal::watch_news() {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = news_;
  // The set holds it since `open`, and a change takes no memory.
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, news_, &event);
}

void WatcherSignal::sleep(TimePoint now, TimePoint until) {
  epoll_event events[2];
  const int count = epoll_wait(epoll_.get(), events, 2, milliseconds_until(now, until));
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == news_) {
      armed_.store(false);
    } else {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = read(kick_.get(), &ignored, sizeof ignored);
      kicked_.store(false);
    }
  }
}

}  // namespace muster::transport
