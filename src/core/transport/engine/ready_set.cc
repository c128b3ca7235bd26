#include "core/transport/engine/ready_set.h"

#include <errno.h>
#include <sys/epoll.h>

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
  epoll_event events[kMost];
  const int count = epoll_wait(epoll_.get(), events, kMost, 0);
  for (int i = 0; i < count; ++i) {
    const auto flags = events[i].events;
    ready_[i].token = static_cast<int>(static_cast<std::int64_t>(events[i].data.u64));
    ready_[i].readable = (flags & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    ready_[i].writable = (flags & EPOLLOUT) != 0;
  }
  return {ready_, static_cast<std::size_t>(count > 0 ? count : 0)};
}

}  // namespace muster::transport
