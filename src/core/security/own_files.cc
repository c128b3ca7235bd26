#include "core/security/own_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "core/base/environment.h"
#include "core/net/socket_address.h"

namespace muster {
namespace {

std::string called(const OwnRules& rules, const std::string& path) {
  return rules.name + " " + path;
}

std::string octal(unsigned mode) {
  char text[16];
  std::snprintf(text, sizeof text, "%04o", mode);
  return text;
}

bool is_anothers(const struct stat& info, const OwnRules& rules) {
  return info.st_uid != ::geteuid() && !(rules.from_root && info.st_uid == 0) &&
         !(rules.root_may_look && ::geteuid() == 0);
}

Status anothers(const std::string& path, const struct stat& info, const OwnRules& rules) {
  return Status(Code::refused,
                called(rules, path) + " belongs to user " + std::to_string(info.st_uid) +
                    ", and this process runs as user " + std::to_string(::geteuid()) +
                    ": what others wrote is not read; remove it, or give another");
}

Status a_link(const std::string& path, const OwnRules& rules) {
  return Status(Code::refused, called(rules, path) +
                                   " is a symbolic link, which others may have laid; give what it "
                                   "leads to");
}

/// Why it could not be opened. The kernel may keep us from what we would refuse anyway.
Status unopened(const std::string& path, int flags, const OwnRules& rules, int at) {
  const int error = errno;
  struct stat info {};
  if (::fstatat(at, path.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    if (S_ISLNK(info.st_mode)) return a_link(path, rules);
    if (is_anothers(info, rules)) return anothers(path, info, rules);
  }
  if (error == ENOENT && (flags & O_CREAT) != 0)
    return Status(Code::invalid_argument,
                  "cannot make " + called(rules, path) + ": its directory does not exist");
  return Status(Code::invalid_argument,
                "cannot open " + called(rules, path) + ": " + errno_text(error));
}

Status judge(int file, const std::string& path, mode_t kind, const OwnRules& rules) {
  struct stat info {};
  if (::fstat(file, &info) != 0)
    return Status(Code::invalid_argument,
                  "cannot look at " + called(rules, path) + ": " + errno_text(errno));
  if ((info.st_mode & S_IFMT) != kind)
    return Status(Code::refused, called(rules, path) + (kind == S_IFDIR ? " is no directory"
                                                                        : " is no regular file"));
  if (is_anothers(info, rules)) return anothers(path, info, rules);
  if (kind == S_IFREG && info.st_nlink > 1)
    return Status(Code::refused, called(rules, path) + " has " + std::to_string(info.st_nlink) +
                                     " names (hard links), which others may have laid; give a "
                                     "copy that has one");
  const bool of_root_alone = info.st_uid == 0 && ::geteuid() != 0;
  const unsigned loose = info.st_mode & 0777 & rules.closed & (of_root_alone ? 027U : 0777U);
  if (loose == 0) return {};
  const bool readable = (loose & 055) != 0;
  return Status(Code::refused, called(rules, path) + " can be " + (readable ? "read" : "written") +
                                   " by others (mode " + octal(info.st_mode & 07777) +
                                   "); close it to them: chmod " +
                                   (rules.closed == 077 ? "go-rwx " : "go-w ") + path);
}

Result<Descriptor> judged(Descriptor opened, const std::string& path, mode_t kind,
                          const OwnRules& rules) {
  if (Status good = judge(opened.get(), path, kind, rules); !good) return good;
  return opened;
}

}  // namespace

Result<Descriptor> open_own_file(const std::string& path, int flags, const OwnRules& rules,
                                 unsigned mode, int at) {
  const int kept = flags & ~O_TRUNC;
  Descriptor opened(
      ::openat(at, path.c_str(), kept | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode));
  if (!opened) return unopened(path, flags, rules, at);
  auto file = judged(std::move(opened), path, S_IFREG, rules);
  if (!file) return file;
  // For users of the file as a stream.
  if (::fcntl(file->get(), F_SETFL, kept & ~O_NONBLOCK) != 0)
    return Status(Code::invalid_argument,
                  "cannot set the mode of " + called(rules, path) + ": " + errno_text(errno));
  if ((flags & O_TRUNC) != 0 && ::ftruncate(file->get(), 0) != 0)
    return Status(Code::invalid_argument,
                  "cannot empty " + called(rules, path) + ": " + errno_text(errno));
  return file;
}

Result<Descriptor> open_own_folder(const std::string& path, const OwnRules& rules, int at) {
  Descriptor opened(::openat(at, path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened) return unopened(path, 0, rules, at);
  return judged(std::move(opened), path, S_IFDIR, rules);
}

std::string own_runtime_folder() {
  const auto named = env_text("XDG_RUNTIME_DIR");
  struct stat info {};
  if (named && ::stat(named->c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
      info.st_uid == ::geteuid() && (info.st_mode & 022) == 0 &&
      ::access(named->c_str(), W_OK | X_OK) == 0)
    return *named + "/muster";
  return "/tmp/muster-" + std::to_string(::geteuid());
}

Result<Descriptor> make_own_folder(const std::string& path, const OwnRules& rules, unsigned mode,
                                   int at) {
  if (::mkdirat(at, path.c_str(), mode) != 0 && errno != EEXIST)
    return Status(Code::invalid_argument,
                  "cannot make " + called(rules, path) + ": " + errno_text(errno));
  return open_own_folder(path, rules, at);
}

}  // namespace muster
