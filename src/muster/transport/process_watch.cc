#include "muster/transport/process_watch.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "muster/base/process_start.h"

namespace muster::transport {

ProcessWatch::Seen ProcessWatch::watch(int rank, std::uint32_t pid, std::uint64_t start_time) {
  if (!epoll_) epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  if (!process) return errno == ESRCH ? Seen::gone : Seen::unknown;
  // Looked at after it was opened: the descriptor stays with the process that had the number then.
  if (process_start(pid) != start_time) return Seen::gone;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = process.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, process.get(), &event) != 0) return Seen::unknown;
  const int fd = process.get();
  watched_.emplace(fd, Watched{rank, pid, GuardedDescriptor(std::move(process))});
  return Seen::alive;
}

bool ProcessWatch::poll(const std::function<void(int rank, std::uint32_t pid)>& ended) {
  if (watched_.empty()) return false;
  std::array<epoll_event, 16> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const auto at = watched_.find(events[static_cast<std::size_t>(i)].data.fd);
    if (at == watched_.end()) continue;
    const int rank = at->second.rank;
    const std::uint32_t pid = at->second.pid;
    watched_.erase(at);
    ended(rank, pid);
  }
  return ready > 0;
}

}  // namespace muster::transport
