/// Sees the end of other processes of this host at once, by pidfd: a process that is killed cannot say so itself, and a forked child of it
/// may keep its sockets open.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "muster/base/fork_guard.h"
#include "muster/base/status.h"

namespace muster::transport {

/// Not thread-safe.
class ProcessWatch {
 public:
  enum class Seen { alive, gone, unknown };

  /// Watches the process `pid` that started at `start_time` (pids are used again). `gone`: it has ended already. `unknown`: this
  /// system cannot watch it (no descriptor, no permission).
  Seen watch(int rank, std::uint32_t pid, std::uint64_t start_time);
  /// For epoll.
  int descriptor() const { return epoll_.get(); }
  /// Calls `ended(rank, pid)` for each process that has ended since; each is reported once.
  bool poll(const std::function<void(int rank, std::uint32_t pid)>& ended);

 private:
  struct Watched {
    int rank;
    std::uint32_t pid;
    GuardedDescriptor process;
  };
  GuardedDescriptor epoll_;
  std::map<int, Watched> watched_;  // by descriptor
};

}  // namespace muster::transport
