// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/failure/process_watch.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"

namespace muster::transport {
namespace {

// At most this many processes are opened in one pass, because other threads may wait for it.
constexpr int kLooksAPass = 8;                            // limit: fairness
constexpr Duration kUntilRoom = std::chrono::seconds(1);  // limit: descriptors run out

}  // namespace

Status ProcessWatch::open() {
  epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  if (!epoll_)
    return Status(Code::exhausted,
                  "cannot make the descriptor to watch processes with: " + errno_text(errno));
  return {};
}

void ProcessWatch::watch(int rank, std::uint32_t pid, std::uint64_t start_time, TimePoint from) {
  waiting_.push_back({rank, pid, start_time, from});
}

shm::FoundProcess ProcessWatch::look_for(const WaitingProcess& wanted) {
  Descriptor process;
  const shm::FoundProcess found = shm::open_process(wanted.pid, wanted.start_time, process);
  if (found != shm::FoundProcess::running) return found;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = process.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, process.get(), &event) != 0)
    return lacks_room(errno) ? shm::FoundProcess::no_room : shm::FoundProcess::unknown;
  const int fd = process.get();
  watched_.emplace(fd, Watched{wanted.rank, GuardedDescriptor(std::move(process))});
  return found;
}

bool ProcessWatch::poll(TimePoint now, const std::function<void(int rank, Seen seen)>& told) {
  bool moved = false;
  for (int looks = 0; looks < kLooksAPass && next_timer() <= now; ++looks) {
    WaitingProcess wanted = waiting_.front();
    waiting_.pop_front();
    const shm::FoundProcess found = look_for(wanted);
    if (found == shm::FoundProcess::running) continue;
    if (found == shm::FoundProcess::no_room) {
      wanted.from = now + kUntilRoom;
      waiting_.push_back(wanted);
      continue;
    }
    told(wanted.rank, found == shm::FoundProcess::gone ? Seen::gone : Seen::unknown);
    moved = true;
  }
  if (watched_.empty()) return moved;
  std::array<epoll_event, 16> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const auto at = watched_.find(events[static_cast<std::size_t>(i)].data.fd);
    if (at == watched_.end()) continue;
    const int rank = at->second.rank;
    watched_.erase(at);
    told(rank, Seen::ended);
  }
  return moved || ready > 0;
}

}  // namespace muster::transport
