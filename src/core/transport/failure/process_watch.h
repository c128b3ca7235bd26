// SPDX-License-Identifier: BSD-3-Clause
/// Detects the end of other processes of this host at once, by pidfd. A killed process cannot
/// announce its end, and a forked child may keep its sockets open.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>

#include "core/base/process/fork_guard.h"
#include "core/shm/process_end.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// Not thread-safe.
class ProcessWatch {
 public:
  enum class Seen : std::uint8_t {
    ended,    ///< while it was watched
    gone,     ///< before it could be
    unknown,  ///< this system cannot watch it (no permission, a kernel before pidfd)
  };

  Status open();
  /// Watches the process `pid` that started at `start_time` (pids are used again), from `from` on:
  /// to look for a process takes some ten microseconds, and every rank looks for every other.
  void watch(int rank, std::uint32_t pid, std::uint64_t start_time, TimePoint from);
  /// For epoll.
  int descriptor() const { return epoll_.get(); }
  /// When there are processes to be looked for.
  TimePoint next_timer() const {
    return waiting_.empty() ? TimePoint::max() : waiting_.front().from;
  }
  /// Looks for some of the processes whose time has come, and calls `told(rank, seen)` for those
  /// that have ended or cannot be watched; nothing more is told of these. A process for which no
  /// descriptor is left is looked for again a second later.
  bool poll(TimePoint now, const std::function<void(int rank, Seen seen)>& told);

 private:
  struct WaitingProcess {
    int rank;
    std::uint32_t pid;
    std::uint64_t start_time;
    TimePoint from;
  };
  struct Watched {
    int rank;
    GuardedDescriptor process;
  };
  shm::FoundProcess look_for(const WaitingProcess& wanted);

  GuardedDescriptor epoll_;
  std::deque<WaitingProcess> waiting_;
  std::map<int, Watched> watched_;  // by descriptor
};

}  // namespace muster::transport
