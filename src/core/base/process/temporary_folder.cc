// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/temporary_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/base/descriptor.h"

namespace muster {

Result<std::string> make_temporary_folder(const std::string& prefix) {
  std::error_code error;
  const auto place = std::filesystem::temp_directory_path(error);
  if (error)
    return Status(Code::invalid_argument,
                  "there is no folder for temporary files (TMPDIR): " + error.message());
  std::string name = (place / (prefix + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr)
    return Status(Code::invalid_argument, "cannot make " + name + ": " + errno_text(errno));
  return name;
}

namespace {

/// This user's folder, open; none where it is gone.
Descriptor opened(const std::filesystem::path& path) {
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found {};
  if (!folder || ::fstat(folder.get(), &found) != 0 || found.st_uid != ::geteuid()) folder.reset();
  return folder;
}

enum class LockOutcome : std::uint8_t { taken, held_elsewhere, unsupported };

/// Holds the folder against removal by others, until the descriptor is closed.
LockOutcome lock(const Descriptor& folder) {
  if (::flock(folder.get(), LOCK_EX | LOCK_NB) == 0) return LockOutcome::taken;
  return errno == EWOULDBLOCK ? LockOutcome::held_elsewhere : LockOutcome::unsupported;
}

/// Whether the path still leads to the open folder.
bool is_there(const std::filesystem::path& path, const Descriptor& folder) {
  struct stat named {
  }, held{};
  return ::stat(path.c_str(), &named) == 0 && ::fstat(folder.get(), &held) == 0 &&
         named.st_ino == held.st_ino && named.st_dev == held.st_dev;
}

/// Folders of processes of this user that were killed before they could remove them.
void remove_abandoned(const std::string& prefix) {
  std::error_code ignored;
  const auto place = std::filesystem::temp_directory_path(ignored);
  for (std::filesystem::directory_iterator each(place, ignored), end; !ignored && each != end;
       each.increment(ignored)) {
    const std::string name = each->path().filename().string();
    if (name.size() != prefix.size() + 6 || !name.starts_with(prefix)) continue;
    const Descriptor folder = opened(each->path());
    if (!folder || lock(folder) != LockOutcome::taken || !is_there(each->path(), folder)) continue;
    std::error_code left;  // the next process that comes by tries again
    std::filesystem::remove_all(each->path(), left);
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder(const std::string& purpose) {
  // Folders of other programs, or of a version that held no locks, have names without the word.
  const std::string prefix = purpose + "held-";
  remove_abandoned(prefix);
  // Between its making and its lock another process may take it for abandoned.
  constexpr int kTries = 16;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto made = make_temporary_folder(prefix);
    if (!made) return;
    Descriptor folder = opened(*made);
    if (!folder || lock(folder) == LockOutcome::held_elsewhere || !is_there(*made, folder))
      continue;
    path_ = std::move(*made);
    lock_ = GuardedDescriptor(std::move(folder));
    return;
  }
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!path_.empty() && !mark_.forked()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace muster
