#include "core/transport/engine/wake_set.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "core/net/socket_address.h"

namespace muster::transport {

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

}  // namespace muster::transport
