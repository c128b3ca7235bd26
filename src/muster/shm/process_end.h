/// Whether a process of this host has ended, for who asks now and then. (`ProcessWatch` tells it
/// unasked.)
#pragma once

#include <cstdint>

#include "muster/base/descriptor.h"
#include "muster/base/fork_guard.h"

namespace muster::shm {

enum class FoundProcess : std::uint8_t {
  running,  ///< as far as it could be opened: it may have ended without having been waited for
  gone,
  no_room,  ///< no descriptor is left for it
  unknown,  ///< this system does not tell (no permission, a kernel before pidfd)
};
/// Opens the process `pid` that started at `start_time` (pids are used again) into `process`: a
/// pidfd, readable once it has ended.
FoundProcess open_process(std::uint32_t pid, std::uint64_t start_time, Descriptor& process);

/// Not thread-safe.
class ProcessEnd {
 public:
  ProcessEnd(std::uint32_t pid, std::uint64_t start_time) : pid_(pid), start_time_(start_time) {}
  /// A system call, the first time a few. False where the system does not tell, as long as the
  /// process's number is not another's.
  bool seen();

 private:
  std::uint32_t pid_;
  std::uint64_t start_time_;
  GuardedDescriptor process_;
  bool seen_ = false;
};

}  // namespace muster::shm
