#include "muster/transport/process_watch.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "muster/base/descriptor.h"
#include "muster/base/process_start.h"
#include "muster/base/socket_address.h"

namespace muster::transport {
namespace {

// So many are looked for in one pass, which others may wait for.
constexpr int kLooksAPass = 8;
constexpr Duration kUntilRoom = std::chrono::seconds(1);

}  // namespace

Status ProcessWatch::open() {
  epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  if (!epoll_) return Status(Code::exhausted, "cannot make the descriptor to watch processes with: " + errno_text(errno));
  return {};
}

void ProcessWatch::watch(int rank, std::uint32_t pid, std::uint64_t start_time, TimePoint from) {
  waiting_.push_back({rank, pid, start_time, from});
}

ProcessWatch::Found ProcessWatch::look_for(const Waiting& wanted) {
  const auto hindered = [] { return lacks_room(errno) ? Found::no_room : Found::unknown; };
  Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(wanted.pid), 0)));
  if (!process) return errno == ESRCH ? Found::gone : hindered();
  // Looked at after it was opened: the descriptor stays with the process that had the number then.
  const auto start = process_start(wanted.pid);
  if (!start) return hindered();
  if (*start != wanted.start_time) return Found::gone;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = process.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, process.get(), &event) != 0) return hindered();
  const int fd = process.get();
  watched_.emplace(fd, Watched{wanted.rank, GuardedDescriptor(std::move(process))});
  return Found::watched;
}

bool ProcessWatch::poll(TimePoint now, const std::function<void(int rank, Seen seen)>& told) {
  bool moved = false;
  for (int looks = 0; looks < kLooksAPass && next_timer() <= now; ++looks) {
    Waiting wanted = waiting_.front();
    waiting_.pop_front();
    const Found found = look_for(wanted);
    if (found == Found::watched) continue;
    if (found == Found::no_room) {
      wanted.from = now + kUntilRoom;
      waiting_.push_back(wanted);
      continue;
    }
    told(wanted.rank, found == Found::gone ? Seen::gone : Seen::unknown);
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
