// SPDX-License-Identifier: BSD-3-Clause
/// The limits that the system sets this process: control groups, memory, and the size of files.
#pragma once

#include <signal.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/status.h"

namespace muster {

struct ControlGroup {
  std::string folder;
  bool unified = true;  ///< version 2; else the controller's own tree of version 1
};

/// Those of `controller` ("cpu", "memory"), from our own up to the root of what is mounted here.
/// `root`: where /proc and /sys stand, for tests.
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = "");

/// The whole of a small file of the system; nothing where it cannot be read.
std::optional<std::string> small_file(const std::string& path);

/// The memory available to this process, by the machine and by its control groups.
struct HostMemory {
  std::size_t limit = 0;  ///< upper bound for this process
  /// Estimate of what it could get now without evicting others.
  std::size_t available = 0;
};

/// Reads files of /proc and /sys; takes tens of microseconds. `root`: their prefix, for tests.
HostMemory host_memory(const std::string& root = "");

// The limit on file sizes, which counts for memory files too. A process that makes a file larger
// is ended by SIGXFSZ instead of being refused. A writer that knows the size asks for the limit
// first; any other uses `FileSizeSignalBlock`, which turns the signal into an error.

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

/// While it lives, a system call of this thread that makes a file too large fails with EFBIG, and
/// the process goes on. Keeps errno.
class FileSizeSignalBlock {
 public:
  FileSizeSignalBlock() {
    ::sigemptyset(&signal_);
    ::sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);  // cannot fail with these arguments
  }
  ~FileSizeSignalBlock() {
    const int error = errno;
    const timespec now{};
    // The signal of a refused write is pending for this thread, and would end the process below.
    while (::sigtimedwait(&signal_, nullptr, &now) < 0 && errno == EINTR) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  FileSizeSignalBlock(const FileSizeSignalBlock&) = delete;
  FileSizeSignalBlock& operator=(const FileSizeSignalBlock&) = delete;

 private:
  sigset_t signal_{}, before_{};
};

}  // namespace muster
