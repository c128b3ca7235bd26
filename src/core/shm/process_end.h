// SPDX-License-Identifier: BSD-3-Clause
/// Whether a process of this host has ended, by polling. (`ProcessWatch` notifies instead.)
#pragma once

#include <cstdint>

#include "core/base/descriptor.h"
#include "core/base/process/fork_guard.h"

namespace muster::shm {

enum class FoundProcess : std::uint8_t {
  running,  ///< the process could be opened; it may be a zombie
  gone,
  no_room,  ///< out of descriptors
  unknown,  ///< not supported here (no permission, or a kernel without pidfd)
};
/// Opens the process `pid` that started at `start_time` (pids are reused) into `process`: a pidfd,
/// readable once the process has ended.
FoundProcess open_process(std::uint32_t pid, std::uint64_t start_time, Descriptor& process);

/// Not thread-safe.
class ProcessEnd {
 public:
  ProcessEnd(std::uint32_t pid, std::uint64_t start_time) : pid_(pid), start_time_(start_time) {}
  /// Costs one system call, on first use several. If the system does not support it, returns false
  /// until the pid belongs to another process.
  bool seen();

 private:
  std::uint32_t pid_;
  std::uint64_t start_time_;
  GuardedDescriptor process_;
  bool seen_ = false;
};

}  // namespace muster::shm
