// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/engine/epoll_sets.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"

namespace muster::transport {
namespace {

bool control(int epoll, int operation, int descriptor, int token, bool writable) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (writable ? static_cast<std::uint32_t>(EPOLLOUT) : 0u);
  event.data.u64 = static_cast<std::uint64_t>(static_cast<std::int64_t>(token));
  return epoll_ctl(epoll, operation, descriptor, &event) == 0;
}

}  // namespace

Status ReadySet::open() {
  Descriptor made(epoll_create1(EPOLL_CLOEXEC));
  if (!made)
    return Status(Code::exhausted, "cannot make an epoll set for the links: " + errno_text(errno));
  epoll_ = GuardedDescriptor(std::move(made));
  return {};
}

bool ReadySet::add(int descriptor, int token) {
  return control(epoll_.get(), EPOLL_CTL_ADD, descriptor, token, false);
}

bool ReadySet::want_writable(int descriptor, int token, bool on) {
  return control(epoll_.get(), EPOLL_CTL_MOD, descriptor, token, on);
}

void ReadySet::remove(int descriptor) {
  // Fails only where the descriptor is not in the set.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
}

std::span<const ReadySet::Ready> ReadySet::poll() {
  epoll_event events[fixed::kReadyLinks];
  const int count = epoll_wait(epoll_.get(), events, fixed::kReadyLinks, 0);
  for (int i = 0; i < count; ++i) {
    const auto flags = events[i].events;
    ready_[i].token = static_cast<int>(static_cast<std::int64_t>(events[i].data.u64));
    ready_[i].readable = (flags & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    ready_[i].writable = (flags & EPOLLOUT) != 0;
  }
  return {ready_, static_cast<std::size_t>(count > 0 ? count : 0)};
}

Status WakeSet::open() {
  epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  nudge_ = GuardedDescriptor(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  if (!epoll_ || !nudge_)
    return Status(Code::exhausted, "cannot make the descriptors to wait on: " + errno_text(errno));
  return watch(nudge_.get());
}

Status WakeSet::watch(int descriptor) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = descriptor;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) == 0) return {};
  return Status(Code::exhausted, "cannot watch a descriptor: " + errno_text(errno));
}

bool WakeSet::any_ready() const {
  pollfd any{epoll_.get(), POLLIN, 0};
  return ::poll(&any, 1, 0) > 0;
}

void WakeSet::nudge() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(nudge_.get(), &one, sizeof one);
}

bool WakeSet::drain() {
  bool nudged = false;
  for (std::uint64_t count = 0; ::read(nudge_.get(), &count, sizeof count) > 0;) nudged = true;
  return nudged;
}

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
  const int count = epoll_wait(epoll_.get(), events, 2, poll_milliseconds(now, until));
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
