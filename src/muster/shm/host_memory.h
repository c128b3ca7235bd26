/// How much memory there is for this process: of the machine and of its control groups.
#pragma once

#include <cstddef>
#include <string>

namespace muster::shm {

struct HostMemory {
  std::size_t limit = 0;  ///< what this process could ever have
  std::size_t available =
      0;  ///< what it could have now without others being driven out; an estimate
};

/// Reads the system's files; some ten microseconds. `root`: where /proc and /sys stand, for tests.
HostMemory host_memory(const std::string& root = "");

}  // namespace muster::shm
