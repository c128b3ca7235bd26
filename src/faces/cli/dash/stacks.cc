// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/stacks.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <system_error>

#include "core/base/descriptor.h"
#include "core/base/process/limits.h"
#include "faces/cli/printable.h"
#include "muster/clock.h"

namespace muster::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLongestStacks = std::size_t{256} << 10;  // limit: a browser's patience
constexpr const char* kToolLimit = "timeout -k 1 15 ";
constexpr int kStacksSignalOffset = 7;  // python/muster/debug.py has the same
constexpr const char* kStacksFile = "/memfd:muster-stacks";
constexpr std::int64_t kLargestStacksFile = std::int64_t{4} << 20;  // limit: a rank's memory
constexpr Duration kAnswerLimit = std::chrono::seconds(2);

/// Returns what a tool prints, errors too; nothing if it is not installed. `arguments` are ours and
/// need no quotes.
std::optional<std::string> run_tool(const std::string& program, const std::string& arguments) {
  const std::string command = "command -v " + program + " >/dev/null || exit 127; " + kToolLimit +
                              program + " " + arguments + " 2>&1 </dev/null";
  // This thread blocks all signals, and the program would inherit that.
  sigset_t none, before;
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, &before);
  FILE* const pipe = ::popen(command.c_str(), "re");
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pipe == nullptr) return std::nullopt;
  std::string text(kLongestStacks, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), pipe));
  const int status = ::pclose(pipe);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return std::nullopt;
  return text;
}

std::string process_folder(std::int64_t pid) { return "/proc/" + std::to_string(pid); }

/// The lines of /proc/PID/status, by name.
std::string status_field(const std::string& folder, const std::string& name) {
  std::istringstream lines(small_file(folder + "/status").value_or(""));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + ":\t")) return line.substr(name.size() + 2);
  return {};
}

bool handles(std::int64_t pid, int signal) {
  const std::string caught = status_field(process_folder(pid), "SigCgt");
  if (caught.empty()) return false;
  const unsigned long long mask = std::strtoull(caught.c_str(), nullptr, 16);
  return (mask >> (signal - 1) & 1) != 0;
}

/// The descriptor's path below /proc of the file that `muster.debug` has made.
std::string stacks_file_of(std::int64_t pid) {
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(process_folder(pid) + "/fd", failed)) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone).string().starts_with(kStacksFile))
      return entry.path().string();
  }
  return {};
}

std::int64_t bytes_in(const Descriptor& file) {
  struct stat info {};
  return ::fstat(file.get(), &info) == 0 ? std::int64_t{info.st_size} : 0;
}

/// Reads what comes into the file behind `begin`, until a while after nothing has come any more.
std::string read_answer(const Descriptor& file, std::int64_t begin) {
  const TimePoint deadline = deadline_after(steady_clock(), kAnswerLimit);
  std::int64_t seen = begin;
  while (steady_clock().now() < deadline) {
    const timespec pause{0, 50'000'000};
    ::nanosleep(&pause, nullptr);
    const std::int64_t size = bytes_in(file);
    if (size > begin && size == seen) break;
    seen = size;
  }
  std::string text(static_cast<std::size_t>(std::clamp<std::int64_t>(
                       seen - begin, 0, static_cast<std::int64_t>(kLongestStacks))),
                   '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), begin);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

/// One line per thread: its name, state, and what it waits for in the kernel.
std::string kernel_stacks(std::int64_t pid) {
  std::string text;
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(process_folder(pid) + "/task", failed)) {
    const std::string folder = entry.path().string();
    std::string line = "thread " + entry.path().filename().string() + " \"" +
                       status_field(folder, "Name") + "\": " + status_field(folder, "State");
    const std::string place = small_file(folder + "/wchan").value_or("");
    const std::string call = small_file(folder + "/syscall").value_or("");
    if (!place.empty() && place != "0") line += ", in " + place;
    if (!call.empty() && std::isdigit(static_cast<unsigned char>(call.front())) != 0)
      line += ", system call " + call.substr(0, call.find(' '));
    text += line + "\n";
    if (text.size() > kLongestStacks) break;
  }
  return text;
}

void add_section(RankStacks& stacks, const char* source, const std::string& text) {
  if (!text.empty()) stacks.sections.push_back({source, printable(text)});
}

}  // namespace

bool is_process_here(const trace::RankTrace& rank) {
  if (rank.life == trace::Life::gone || rank.pid <= 0) return false;
  struct stat file {};
  if (::stat(rank.path.c_str(), &file) != 0) return false;
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(process_folder(rank.pid) + "/fd", failed)) {
    struct stat held {};
    if (::stat(entry.path().c_str(), &held) == 0 && held.st_dev == file.st_dev &&
        held.st_ino == file.st_ino)
      return true;
  }
  return false;
}

std::string ask_for_stacks(std::int64_t pid) {
  // The process cannot be another one than the one that is looked at from here on.
  const Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  const int signal = SIGRTMIN + kStacksSignalOffset;
  const std::string path = process ? stacks_file_of(pid) : std::string();
  if (path.empty() || !handles(pid, signal)) return {};
  // Another file may have taken the descriptor's number meanwhile, one that blocks, or is precious.
  const Descriptor file(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  std::error_code failed;
  const fs::path opened = fs::read_symlink("/proc/self/fd/" + std::to_string(file.get()), failed);
  if (!file || failed || !opened.string().starts_with(kStacksFile)) return {};
  if (bytes_in(file) > kLargestStacksFile) static_cast<void>(::ftruncate(file.get(), 0));
  const std::int64_t begin = bytes_in(file);
  if (::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0) != 0) return {};
  return read_answer(file, begin);
}

namespace {

void add_python_stacks(std::int64_t pid, RankStacks& stacks) {
  const std::string own = ask_for_stacks(pid);
  add_section(stacks, "faulthandler", own);
  if (const auto text = run_tool("py-spy", "dump --nonblocking --pid " + std::to_string(pid))) {
    add_section(stacks, "py-spy", *text);
  } else if (own.empty()) {
    stacks.notes.emplace_back(
        "for stacks of Python install py-spy, or call muster.debug.start_debug_server in the "
        "program");
  }
}

void add_native_stacks(std::int64_t pid, RankStacks& stacks) {
  const std::string process = std::to_string(pid);
  if (const auto text = run_tool("eu-stack", "-n 64 -p " + process))
    return add_section(stacks, "eu-stack", *text);
  if (const auto text = run_tool("gdb", "-nx -batch -iex 'set auto-load off' -p " + process +
                                            " -ex 'set pagination off' -ex 'thread apply all "
                                            "backtrace 64'"))
    return add_section(stacks, "gdb", *text);
  stacks.notes.emplace_back("for stacks of C++ install elfutils (eu-stack) or gdb");
}

}  // namespace

RankStacks stacks_of(const trace::RankTrace& rank, bool native) {
  RankStacks stacks;
  if (rank.life == trace::Life::gone) {
    stacks.notes.emplace_back("its process is gone; the calls that it was in are in its trace");
    return stacks;
  }
  if (!is_process_here(rank)) {
    stacks.notes.push_back("its process is on " + rank.host +
                           ", or in another container: run muster dash there to see its stacks");
    return stacks;
  }
  if (rank.life == trace::Life::stopped) {
    stacks.notes.emplace_back("its process is stopped, so only the kernel is asked");
  } else {
    add_python_stacks(rank.pid, stacks);
    if (native) add_native_stacks(rank.pid, stacks);
  }
  add_section(stacks, "kernel", kernel_stacks(rank.pid));
  return stacks;
}

}  // namespace muster::cli
