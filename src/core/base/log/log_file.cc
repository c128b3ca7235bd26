// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace muster {
namespace {

std::string expanded(const std::string& pattern) {
  std::string path;
  for (std::size_t at = 0; at < pattern.size(); ++at) {
    const char next = pattern[at] == '%' && at + 1 < pattern.size() ? pattern[at + 1] : '\0';
    char host[HOST_NAME_MAX + 1] = {};
    if (next == 'h') path += ::gethostname(host, HOST_NAME_MAX) == 0 ? host : "unknown";
    if (next == 'p') path += std::to_string(::getpid());
    if (next == '%') path += '%';
    if (next == 'h' || next == 'p' || next == '%') {
      ++at;
    } else {
      path += pattern[at];
    }
  }
  return path;
}

/// As core/security/own_files.h, which stands above the log.
Status judge(const struct stat& file) {
  if (!S_ISREG(file.st_mode)) return Status(Code::refused, "it is no regular file");
  if (file.st_uid != ::geteuid()) return Status(Code::refused, "it is another user's");
  if (file.st_nlink > 1) return Status(Code::refused, "it has a second name (a hard link)");
  if ((file.st_mode & 022) != 0) return Status(Code::refused, "others may write to it");
  return {};
}

Result<Descriptor> open_to_append(const std::string& path) {
  Descriptor file(
      ::open(path.c_str(),
             O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600));
  if (!file) return Status(Code::invalid_argument, errno_text(errno));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return Status(Code::invalid_argument, errno_text(errno));
  if (Status judged = judge(info); !judged) return judged;
  return file;
}

}  // namespace

Status RotatingLog::open() {
  if (path_.empty()) {
    std::error_code error;
    const std::string path = expanded(pattern_);
    path_ = std::filesystem::absolute(path, error).string();
    if (error) path_ = path;
  }
  auto file = open_to_append(path_);
  if (!file) return file.status();
  file_ = std::move(*file);
  return {};
}

/// FILE.N is overwritten by FILE.(N-1), and so on. A file that cannot be renamed keeps its name,
/// and the log goes on in it.
void RotatingLog::rename_all() const {
  for (int number = limits_.kept - 1; number >= 1; --number)
    ::rename((path_ + "." + std::to_string(number)).c_str(),
             (path_ + "." + std::to_string(number + 1)).c_str());
  ::rename(path_.c_str(), (path_ + ".1").c_str());
}

void RotatingLog::make_room(std::size_t bytes) {
  struct stat own {
  }, named{};
  if (::fstat(file_.get(), &own) != 0 || own.st_size == 0 ||
      static_cast<std::uint64_t>(own.st_size) + bytes <= limits_.bytes)
    return;
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return;
  const bool is_named = ::stat(path_.c_str(), &named) == 0 && named.st_ino == own.st_ino &&
                        named.st_dev == own.st_dev;
  if (is_named) rename_all();
  // Closing the old file unlocks it. If the new one is refused, the old one goes on.
  if (!open()) ::flock(file_.get(), LOCK_UN);
}

ssize_t RotatingLog::write(std::string_view lines) {
  if (!file_ && !refused_) {
    if (const Status opened = open(); !opened) {
      refused_ = true;
      std::fprintf(stderr,
                   "muster: MUSTER_LOG_FILE: %s cannot be written: %s; the log goes to "
                   "standard error\n",
                   path_.c_str(), opened.message().c_str());
    }
  }
  if (!file_) {
    errno = EBADF;
    return -1;
  }
  make_room(lines.size());
  return ::write(file_.get(), lines.data(), lines.size());
}

}  // namespace muster
