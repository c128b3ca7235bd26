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
#include <utility>

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

std::string log_path_from_here(const std::string& path) {
  std::error_code error;
  const std::string folder = std::filesystem::current_path(error).string();
  if (error || path.starts_with('/')) return path;
  std::string pattern;
  for (const char each : folder) pattern += each == '%' ? "%%" : std::string(1, each);
  return pattern + "/" + path;
}

RotatingLog::RotatingLog(const std::string& path, Rotation limits)
    : pattern_(log_path_from_here(path)), limits_(limits) {}

Status RotatingLog::open() {
  if (path_.empty()) path_ = expanded(pattern_);
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

bool RotatingLog::is_at_its_path() const {
  struct stat own {
  }, named{};
  return ::fstat(file_.get(), &own) == 0 && ::stat(path_.c_str(), &named) == 0 &&
         named.st_ino == own.st_ino && named.st_dev == own.st_dev;
}

void RotatingLog::make_room(std::size_t bytes) {
  // It has been renamed by another process, or deleted. If a new one is refused, this one
  // goes on.
  if (!is_at_its_path()) static_cast<void>(open());
  struct stat own {};
  if (::fstat(file_.get(), &own) != 0 || own.st_size == 0 ||
      static_cast<std::uint64_t>(own.st_size) + bytes <= limits_.bytes)
    return;
  // A forked child may share the lock, so it is given back by name. The descriptor stays open until
  // then.
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return;
  const Descriptor locked(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0));
  if (is_at_its_path()) rename_all();
  static_cast<void>(open());
  ::flock(locked ? locked.get() : file_.get(), LOCK_UN);
}

/// The bytes written before a failure may end within a line.
ssize_t RotatingLog::append(std::string_view lines) {
  if (torn_ && failing_) {
    if (const ssize_t ended = ::write(file_.get(), "\n", 1); ended != 1) return -1;
  }
  const ssize_t written = ::write(file_.get(), lines.data(), lines.size());
  if (written >= 0) torn_ = static_cast<std::size_t>(written) < lines.size();
  return written;
}

void RotatingLog::complain(const char* why) {
  if (!std::exchange(failing_, true))
    std::fprintf(stderr,
                 "muster: MUSTER_LOG_FILE: %s cannot be written: %s; lines go to standard error "
                 "until it can\n",
                 path_.c_str(), why);
}

ssize_t RotatingLog::write(std::string_view lines) {
  if (!file_) {
    if (const Status opened = open(); !opened) {
      complain(opened.message().c_str());
      errno = EBADF;
      return -1;
    }
  }
  make_room(lines.size());
  const ssize_t written = append(lines);
  if (written >= 0) {
    failing_ = false;
  } else if (errno != EINTR && errno != EAGAIN) {
    const int error = errno;
    complain(errno_text(error).c_str());
    errno = EBADF;
  }
  return written;
}

}  // namespace muster
