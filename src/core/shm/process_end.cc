// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/process_end.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/base/process/process_start.h"
#include "core/net/socket_address.h"

namespace muster::shm {

FoundProcess open_process(std::uint32_t pid, std::uint64_t start_time, Descriptor& process) {
  const auto failure = [] {
    return lacks_room(errno) ? FoundProcess::no_room : FoundProcess::unknown;
  };
  Descriptor opened(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  if (!opened) return errno == ESRCH ? FoundProcess::gone : failure();
  // Checked after the open: the descriptor keeps referring to the process that had the pid then.
  const auto start = process_start(pid);
  if (!start) return failure();
  if (*start != start_time) return FoundProcess::gone;
  process = std::move(opened);
  return FoundProcess::running;
}

bool ProcessEnd::seen() {
  if (seen_) return true;
  if (!process_) {
    Descriptor opened;
    const FoundProcess found = open_process(pid_, start_time_, opened);
    if (found != FoundProcess::running) {
      const auto start = found == FoundProcess::gone ? 0 : process_start(pid_);
      return seen_ = start && *start != start_time_;
    }
    process_ = GuardedDescriptor(std::move(opened));
  }
  pollfd end{process_.get(), POLLIN, 0};
  return seen_ = ::poll(&end, 1, 0) == 1;
}

}  // namespace muster::shm
