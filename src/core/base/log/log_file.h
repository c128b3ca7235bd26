// SPDX-License-Identifier: BSD-3-Clause
/// The file of MUSTER_LOG_FILE, which begins anew when it is full.
///
/// Several processes may write to one file: each appends whole lines, and the process that finds it
/// full renames it (FILE to FILE.1, FILE.1 to FILE.2, ...) under a lock on it. The others look
/// before each write whether their file is still the one at the path, and open that one. A lock
/// that is taken is not waited for, so a process that stands still holds up no other: the file
/// grows meanwhile.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster {

/// The path for MUSTER_LOG_FILE that leads, from any folder, to where `path` does from this one.
std::string log_path_from_here(const std::string& path);

/// Used by one thread at a time. Private to `log_lines.cc`.
class RotatingLog {
 public:
  struct Rotation {
    std::uint64_t bytes = std::uint64_t{64} << 20;  // limit: disk; then it is renamed
    int kept = 5;                                   ///< renamed files
  };
  /// Opens nothing yet. `%h` in the path is the host, `%p` the process that opens it. A relative
  /// path is of the present folder.
  RotatingLog(const std::string& path, Rotation limits);

  /// As ::write. If there is no file, or it takes nothing (a full disk), errno is EBADF, and the
  /// reason is written to standard error once, until it can be written again.
  ssize_t write(std::string_view lines);

 private:
  Status open();
  bool is_at_its_path() const;
  void make_room(std::size_t bytes);
  ssize_t append(std::string_view lines);
  void complain(const char* why);
  void rename_all() const;

  const std::string pattern_;
  const Rotation limits_;
  std::string path_;
  Descriptor file_;
  bool failing_ = false;  // and that has been said
  bool torn_ = false;     // the last piece was written in part
};

}  // namespace muster
