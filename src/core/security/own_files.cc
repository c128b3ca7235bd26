// SPDX-License-Identifier: BSD-3-Clause
#include "core/security/own_files.h"

#include <dlfcn.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/base/process/fork_guard.h"
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

namespace {

constexpr int kMostLinks = 40;         // limit: the kernel's
constexpr uid_t kUnknownUser = 65534;  // limit: the kernel's "overflowuid"

Status refused(const std::string& path, const std::string& why) {
  return Status(Code::refused, path + " " + why +
                                   ": what lies there or below is not used unless it is "
                                   "named, by the option or variable for it");
}

/// Whether a group has only this user, as those that many systems make for each user. Folders made
/// there are open to the group by default.
bool is_private_group(gid_t group) {
  if (::geteuid() == 0 || group != ::getegid()) return false;
  std::array<char, 16384> user_text, group_text;
  struct passwd user {
  }, *found_user = nullptr;
  struct group entry {
  }, *found = nullptr;
  if (::getpwuid_r(::geteuid(), &user, user_text.data(), user_text.size(), &found_user) != 0 ||
      ::getgrgid_r(group, &entry, group_text.data(), group_text.size(), &found) != 0 ||
      found_user == nullptr || found == nullptr || std::strcmp(user.pw_name, entry.gr_name) != 0)
    return false;
  for (char** member = entry.gr_mem; *member != nullptr; ++member)
    if (std::strcmp(*member, user.pw_name) != 0) return false;
  return true;
}

/// The users and groups that could have replaced the file that this code runs from.
struct Trusted {
  std::set<uid_t> users;
  std::set<gid_t> groups;
  std::set<std::pair<dev_t, ino_t>> places;  // the file and the folders above it
};

/// The program or library that this code is in.
std::string file_of_this_code() {
  Dl_info here{};
  // For the program itself dladdr knows only how it was called.
  if (::dladdr(reinterpret_cast<const void*>(&check_trusted_place), &here) != 0 &&
      here.dli_fname != nullptr && here.dli_fname[0] == '/')
    return here.dli_fname;
  std::array<char, PATH_MAX> target;
  const ssize_t length = ::readlink("/proc/self/exe", target.data(), target.size());
  return length <= 0 ? std::string() : std::string(target.data(), static_cast<std::size_t>(length));
}

/// In a namespace that does not map a user, all of that user's files show as 65534's. In a sticky
/// folder a group cannot replace what is another's.
Trusted those_who_could_replace(std::string file) {
  Trusted found;
  for (; !file.empty(); file.resize(file == "/" ? 0 : std::max<std::size_t>(file.rfind('/'), 1))) {
    struct stat info {};
    if (::stat(file.c_str(), &info) != 0) break;
    found.places.emplace(info.st_dev, info.st_ino);
    if (info.st_uid != kUnknownUser) found.users.insert(info.st_uid);
    const bool sticky = S_ISDIR(info.st_mode) && (info.st_mode & S_ISVTX) != 0;
    if ((info.st_mode & 020) != 0 && !sticky && info.st_gid != kUnknownUser)
      found.groups.insert(info.st_gid);
  }
  return found;
}

Status judge(const std::string& path, const struct stat& info, const Trusted& trusted) {
  if (info.st_uid != 0 && info.st_uid != ::geteuid() && !trusted.users.contains(info.st_uid) &&
      !trusted.places.contains({info.st_dev, info.st_ino}))
    return refused(path, "belongs to user " + std::to_string(info.st_uid) +
                             (info.st_uid == kUnknownUser ? " (who may have no number here)" : "") +
                             ", and this process runs as user " + std::to_string(::geteuid()));
  if (S_ISLNK(info.st_mode)) return {};  // its mode means nothing
  const bool sticky = S_ISDIR(info.st_mode) && (info.st_mode & S_ISVTX) != 0;
  if ((info.st_mode & 022) == 0 || sticky) return {};
  if ((info.st_mode & 002) == 0 &&
      (trusted.groups.contains(info.st_gid) || is_private_group(info.st_gid)))
    return {};
  return refused(path, "can be written by others (chmod go-w closes it)");
}

/// The names in `path`, in front of what is left.
void put_before(std::deque<std::string>& left, std::string_view path) {
  std::vector<std::string> names;
  while (!path.empty()) {
    const std::string_view name = path.substr(0, path.find('/'));
    if (!name.empty() && name != ".") names.emplace_back(name);
    path.remove_prefix(std::min(path.size(), name.size() + 1));
  }
  left.insert(left.begin(), names.begin(), names.end());
}

}  // namespace

Status check_trusted_place(const std::string& path, const std::string& own_file) {
  const Trusted trusted =
      those_who_could_replace(own_file.empty() ? file_of_this_code() : own_file);
  std::deque<std::string> left;
  put_before(left, path);
  std::string at;  // no link is left in it; empty: the root
  if (!path.starts_with('/')) {
    std::array<char, PATH_MAX> folder;
    if (::getcwd(folder.data(), folder.size()) == nullptr)
      return Status(Code::invalid_argument, path + ": " + errno_text(errno));
    put_before(left, folder.data());
  }
  for (int links = 0; !left.empty();) {
    const std::string name = std::move(left.front());
    left.pop_front();
    if (name == "..") {
      at.resize(at.empty() ? 0 : at.rfind('/'));
      continue;
    }
    std::string next = at;
    next.append("/").append(name);
    struct stat info {};
    if (::lstat(next.c_str(), &info) != 0)
      return Status(Code::invalid_argument, next + ": " + errno_text(errno));
    if (Status good = judge(next, info, trusted); !good) return good;
    if (!S_ISLNK(info.st_mode)) {
      at = next;
      continue;
    }
    std::array<char, PATH_MAX> target;
    const ssize_t length = ::readlink(next.c_str(), target.data(), target.size());
    if (length <= 0 || ++links > kMostLinks)
      return Status(Code::invalid_argument, next + " is a link that leads nowhere");
    const std::string_view leads_to(target.data(), static_cast<std::size_t>(length));
    if (leads_to.starts_with('/')) at.clear();
    put_before(left, leads_to);
  }
  return {};
}

bool is_trusted_place(const std::string& path) {
  const Status judged = check_trusted_place(path);
  if (judged.code() != Code::refused) return judged.ok();
  struct Warnings {
    std::mutex mutex;
    std::set<std::string> logged;
  };
  static constinit PerProcess<Warnings> of_process;
  Warnings& warnings = of_process.get();
  const std::lock_guard lock(warnings.mutex);
  if (warnings.logged.insert(judged.message()).second) log(LogLevel::warning, judged.message());
  return false;
}

}  // namespace muster
