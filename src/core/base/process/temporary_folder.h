// SPDX-License-Identifier: BSD-3-Clause
/// Folders of this process's own, in the place that the system has for what need not last (TMPDIR,
/// else /tmp).
#pragma once

#include <string>

#include "core/base/process/fork_guard.h"
#include "muster/status.h"

namespace muster {

/// Makes one whose name begins with `prefix`, for this user alone. It stays.
Result<std::string> make_temporary_folder(const std::string& prefix);

/// One whose name begins with `purpose`, made with it, and removed with it and with all it holds. A
/// forked child's copy leaves it to its maker. If the maker is killed, the next folder of this user
/// with that prefix removes it: the maker's lock says that it is in use.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& purpose);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  /// Empty where none could be made.
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  GuardedDescriptor lock_;  // its end lets others remove what is left
  ProcessMark mark_;
};

}  // namespace muster
