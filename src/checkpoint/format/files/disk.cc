// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "core/base/environment.h"
#include "core/base/process/limits.h"
#include "core/net/socket_address.h"

namespace muster::shards {
namespace {

/// The most bytes that one system call moves: below the kernel's own limit of 2^31.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;  // limit: of a system call

Status failed(const std::string& what, const std::string& path, int error) {
  return {lacks_room(error) || error == EFBIG ? Code::exhausted : Code::invalid_argument,
          "checkpoint: cannot " + what + " " + path + ": " + errno_text(error)};
}

/// False: see errno. A file system over a network may be interrupted by a signal.
bool bring_to_disk(int file) {
  int done = 0;
  do {
    done = ::fsync(file);
  } while (done != 0 && errno == EINTR);
  return done == 0;
}

}  // namespace

Result<FileWriter> FileWriter::create(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file) return failed("create", path, errno);
  return FileWriter(path, std::move(file));
}

Status FileWriter::write(std::span<const std::byte> bytes) {
  const FileSizeSignalBlock block;
  while (!bytes.empty()) {
    const ssize_t count =
        ::write(file_.get(), bytes.data(), std::min(bytes.size(), kLargestTransfer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failed("write", path_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return {};
}

Status FileWriter::close(bool durable) {
  if (durable && !bring_to_disk(file_.get())) return failed("bring to the disk", path_, errno);
  if (::close(file_.release()) != 0) return failed("write", path_, errno);
  return {};
}

Result<FileReader> FileReader::open(const std::string& path) {
  // A pipe of that name would otherwise be waited for.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file) return failed("open", path, errno);
  struct stat about {};
  if (::fstat(file.get(), &about) != 0) return failed("open", path, errno);
  if (!S_ISREG(about.st_mode))
    return Status(Code::invalid_argument, "checkpoint: " + path + " is no file");
  return FileReader(path, std::move(file), static_cast<std::uint64_t>(about.st_size));
}

Status FileReader::read_at(std::uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = ::pread(file_.get(), to.data(), std::min(to.size(), kLargestTransfer),
                                  static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failed("read", path_, errno);
    if (count == 0)
      return {Code::invalid_argument,
              "checkpoint: " + path_ + " ends at byte " + std::to_string(offset) + ", " +
                  std::to_string(to.size()) + " bytes early: it is cut off"};
    offset += static_cast<std::uint64_t>(count);
    to = to.subspan(static_cast<std::size_t>(count));
  }
  return {};
}

Result<std::string> read_text(const std::string& path, std::uint64_t limit) {
  const auto file = FileReader::open(path);
  if (!file) return file.status();
  if (file->bytes() > limit)
    return Status(Code::invalid_argument,
                  "checkpoint: " + path + " has " + std::to_string(file->bytes()) +
                      " bytes, more than the " + std::to_string(limit) + " that are read");
  std::string text(file->bytes(), '\0');
  if (Status read = file->read_at(0, std::as_writable_bytes(std::span(text))); !read) return read;
  return text;
}

Status write_text(const std::string& path, std::string_view text, bool durable) {
  const std::string beside = path + ".writing";
  ::unlink(beside.c_str());
  auto file = FileWriter::create(beside);
  if (!file) return file.status();
  if (Status done = file->write(std::as_bytes(std::span(text.data(), text.size()))); !done)
    return done;
  if (Status done = file->close(durable); !done) return done;
  if (::rename(beside.c_str(), path.c_str()) != 0) return failed("rename", beside, errno);
  return durable ? sync_folder(folder_of(path)) : Status();
}

Status sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return failed("open", path, errno);
  if (!bring_to_disk(folder.get()) &&
      errno != EINVAL)  // EINVAL: a file system without such a thing
    return failed("bring to the disk", path, errno);
  return {};
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::int64_t changed_ns(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return 0;
  return about.st_mtim.tv_sec * std::int64_t{1'000'000'000} + about.st_mtim.tv_nsec;
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(without_slash(path)).parent_path().string();
  return parent.empty() ? "." : parent;
}

Status make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  return error ? failed("create", path, error.value()) : Status();
}

Status make_new_folder(const std::string& path) {
  return ::mkdir(path.c_str(), 0777) == 0 ? Status() : failed("create", path, errno);
}

Status remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return failed("remove", path, errno);
}

Status rename_file(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str()) == 0 ? Status() : failed("rename", from, errno);
}

Status remove_empty_folder(const std::string& path) {
  if (::rmdir(path.c_str()) == 0 || errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST)
    return {};
  return failed("remove", path, errno);
}

Status put_in_place(const std::string& from, const std::string& to, bool replaces) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                  replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE) == 0)
    return {};
  // A plain rename replaces an empty folder at most.
  if (!replaces && (errno == EINVAL || errno == ENOSYS) && ::rename(from.c_str(), to.c_str()) == 0)
    return {};
  if (replaces && (errno == EINVAL || errno == ENOSYS))
    return {Code::unsupported, "checkpoint: this file system cannot replace " + to +
                                   " in one step, so that a kill would lose it; save under another "
                                   "name and keep the last few"};
  return failed("rename", from + " to " + to, errno);
}

namespace {

constexpr std::string_view kSchemeEnds = "://", kFileScheme = "file", kThisHost = "localhost/";
constexpr std::string_view kFilePath = "file:/";  // the same without a host

/// "s3" of "s3://bucket"; empty for a path.
std::string scheme_of(const std::string& name) {
  const std::size_t end = name.find(kSchemeEnds);
  if (end == std::string::npos || end == 0) return {};
  std::string scheme = name.substr(0, end);
  const bool good = std::all_of(scheme.begin(), scheme.end(), [](unsigned char each) {
    return std::isalnum(each) != 0 || each == '+' || each == '-' || each == '.';
  });
  if (!good || std::isalpha(static_cast<unsigned char>(scheme.front())) == 0) return {};
  std::transform(scheme.begin(), scheme.end(), scheme.begin(),
                 [](unsigned char each) { return static_cast<char>(std::tolower(each)); });
  return scheme;
}

}  // namespace

Result<std::string> local_path(const std::string& name) {
  std::string path = name;
  const std::string scheme = scheme_of(name);
  if (!scheme.empty() && scheme != kFileScheme)
    return Status(Code::unsupported,
                  "checkpoint: '" + name + "' is a name of " + scheme +
                      ", and checkpoints are folders of a mounted file system: save to such a "
                      "folder and copy it, or mount the store");
  if (!scheme.empty()) {
    path.erase(0, kFileScheme.size() + kSchemeEnds.size());
    if (path.starts_with(kThisHost)) path.erase(0, kThisHost.size() - 1);
    if (!path.starts_with('/') && !path.starts_with('~'))
      return Status(Code::invalid_argument,
                    "checkpoint: '" + name + "' names the host '" + path.substr(0, path.find('/')) +
                        "': file:///folder, with three slashes, is a folder of this machine");
  } else if (path.starts_with(kFilePath)) {
    path.erase(0, kFilePath.size() - 1);
  }
  if (path == "~" || path.starts_with("~/")) {
    const auto home = env_text("HOME");
    if (!home || home->empty())
      return Status(Code::invalid_argument,
                    "checkpoint: '" + name + "' begins in the home folder, and HOME is not set");
    path.replace(0, 1, without_slash(*home));
  }
  if (path.empty())
    return Status(Code::invalid_argument, "checkpoint: the name of a folder is needed");
  return without_slash(path);
}

}  // namespace muster::shards
