/// The memory available to this process, by the machine and by its control groups.
#pragma once

#include <cstddef>
#include <string>

namespace muster::shm {

struct HostMemory {
  std::size_t limit = 0;  ///< upper bound for this process
  /// Estimate of what it could get now without evicting others.
  std::size_t available = 0;
};

/// Reads files of /proc and /sys; takes tens of microseconds. `root`: their prefix, for tests.
HostMemory host_memory(const std::string& root = "");

}  // namespace muster::shm
