// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/process_start.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "core/base/process/limits.h"

namespace muster {
namespace {

/// A line of /proc/PID/stat.
struct ProcessLine {
  char state = 0;
  std::uint64_t start = 0;  ///< 0: there is no such process
  int exit_code = 0;        ///< as of wait(); 0 also where this process may not read it
};

std::optional<ProcessLine> read_line(std::int64_t pid) {
  const Descriptor file(
      ::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return errno == ENOENT || errno == ESRCH ? std::optional(ProcessLine()) : std::nullopt;
  std::array<char, 1024> line;  // numbers, and a name of at most 64 bytes
  ssize_t got;
  while ((got = ::read(file.get(), line.data(), line.size())) < 0 && errno == EINTR) {
  }
  if (got < 0) return errno == ESRCH ? std::optional(ProcessLine()) : std::nullopt;
  const std::string_view text(line.data(), static_cast<std::size_t>(got));
  errno = EPROTO;  // should the line not be what it always is
  // The name, in parentheses, may hold anything; after it come "state ppid ...": the start is field
  // 22, the 20th after the name.
  std::size_t at = text.rfind(')');
  if (at == std::string_view::npos || at + 2 >= text.size()) return std::nullopt;
  ProcessLine found{.state = text[at + 2]};
  for (int field = 0; field < 20; ++field) {
    at = text.find(' ', at + 1);
    if (at == std::string_view::npos) return std::nullopt;
  }
  std::from_chars(text.data() + at + 1, text.data() + text.size(), found.start);
  // The exit code is the last field, 52.
  at = text.rfind(' ');
  std::from_chars(text.data() + at + 1, text.data() + text.size(), found.exit_code);
  return found;
}

}  // namespace

std::optional<std::uint64_t> process_start(std::int64_t pid) {
  const auto line = read_line(pid);
  return line ? std::optional(line->start) : std::nullopt;
}

ProcessState process_state(std::int64_t pid, std::uint64_t start_time) {
  const auto line = read_line(pid);
  if (!line || line->start != start_time || line->state == 'Z' || line->state == 'X')
    return ProcessState::unknown;
  return line->state == 'T' || line->state == 't' ? ProcessState::stopped : ProcessState::running;
}

std::optional<int> ending_signal(std::int64_t pid, std::uint64_t start_time) {
  const auto line = read_line(pid);
  // A stopped process shows the signal that stopped it.
  if (!line || line->start != start_time || line->state == 'T' || line->state == 't') return {};
  const bool ended = line->state == 'Z' || line->state == 'X';
  if (!ended && line->exit_code == 0) return {};
  return line->exit_code & 0x7f;
}

std::string boot_id() {
  const std::string text = small_file("/proc/sys/kernel/random/boot_id").value_or("");
  return text.substr(0, text.find('\n'));
}

std::uint64_t namespace_inode(const char* kind) {
  struct stat file {};
  const std::string path = std::string("/proc/thread-self/ns/") + kind;
  return ::stat(path.c_str(), &file) == 0 ? static_cast<std::uint64_t>(file.st_ino) : 0;
}

}  // namespace muster
