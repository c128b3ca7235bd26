#include "muster/transport/watcher.h"

#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "muster/base/log.h"
#include "muster/base/socket_address.h"
#include "muster/base/thread_start.h"
#include "muster/transport/engine.h"

namespace muster::transport {
namespace {

// While user threads poll, news do not wake the watcher; this often it looks whether they still do.
constexpr Duration kAwayWhilePolled = std::chrono::milliseconds(1);

int milliseconds_until(TimePoint now, TimePoint then) {
  if (then == TimePoint::max()) return -1;
  if (then <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(then - now).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

}  // namespace

Watcher::~Watcher() { stop(); }

Status Watcher::start(int news) {
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
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, kick_.get(), &event);
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = news_;
  armed_.store(true);
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, news_, &event);

  auto thread = start_thread("the thread that watches the links", [this] { run(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void Watcher::stop() {
  if (!thread_.joinable()) return;
  if (mark_.forked()) {
    thread_.detach();
    return;
  }
  stop_.store(true);
  kick();
  thread_.join();
}

void Watcher::kick() {
  if (kicked_.exchange(true)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(kick_.get(), &one, sizeof one);
}

void Watcher::arm() {
  if (!engine_.tell_watcher(armed_)) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = news_;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, news_, &event);
}

void Watcher::rearm() {
  if (!armed()) arm();
}

void Watcher::run() {
  pthread_setname_np(pthread_self(), "muster-watcher");
  set_log_rank(engine_.rank());
  TimePoint wake = engine_.watch_pass();
  std::uint64_t polls = engine_.polls();
  while (!stop_.load()) {
    TimePoint now = steady_clock().now();
    if (!armed_.load()) wake = std::min(wake, now + kAwayWhilePolled);
    epoll_event events[2];
    const int count = epoll_wait(epoll_.get(), events, 2, milliseconds_until(now, wake));
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == news_) {
        armed_.store(false);
      } else {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const auto got = read(kick_.get(), &ignored, sizeof ignored);
        kicked_.store(false);
      }
    }
    if (stop_.load()) return;
    // Somebody polls, or has between our last look and now: the news are theirs.
    const std::uint64_t polls_now = engine_.polls();
    const bool polled = engine_.pollers_active() || (!armed_.load() && polls_now != polls);
    polls = polls_now;
    wake = engine_.watch_pass();
    polls = engine_.polls();
    if (!polled) arm();
  }
}

}  // namespace muster::transport
