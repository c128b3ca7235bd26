/// The limit on file sizes, which counts for memory files too. A process that makes a file larger
/// is ended by SIGXFSZ instead of being refused, so it is asked before.
#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <limits>
#include <string>

#include "muster/status.h"

namespace muster {

/// In bytes.
inline std::uint64_t largest_file() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY
             ? limit.rlim_cur
             : std::numeric_limits<std::uint64_t>::max();
}

/// Code::exhausted where `file` cannot have `bytes`.
inline Status check_file_size(const std::string& file, std::uint64_t bytes) {
  if (bytes <= largest_file()) return {};
  return Status(Code::exhausted, file + " needs " + std::to_string(bytes) +
                                     " bytes, and the limit on file sizes is " +
                                     std::to_string(largest_file()) +
                                     " bytes; raise it (ulimit -f)");
}

}  // namespace muster
