// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <sstream>

#include "core/net/socket_address.h"

namespace muster::launch {

std::string signal_name(int signal) {
  if (signal >= SIGRTMIN && signal <= SIGRTMAX) {
    return signal == SIGRTMIN ? "SIGRTMIN" : "SIGRTMIN+" + std::to_string(signal - SIGRTMIN);
  }
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

std::string describe(const ProcessExit& exit) {
  if (exit.signal == 0) return "exit code " + std::to_string(exit.code);
  std::string text = signal_name(exit.signal) + " (signal " + std::to_string(exit.signal);
  if (const char* meaning = sigdescr_np(exit.signal)) text += std::string(": ") + meaning;
  return text + (exit.dumped_core ? ", core dumped)" : ")");
}

Result<Descriptor> open_pidfd(pid_t pid) {
  // Uses the system call directly, because glibc's wrapper is newer than the kernel's support.
  // Always close-on-exec.
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd >= 0) return Descriptor(fd);
  return Status(Code::exhausted, "cannot open a descriptor that watches process " +
                                     std::to_string(pid) + ": " + errno_text(errno) +
                                     "; Linux 5.3 or later and a free file descriptor are needed");
}

namespace {

Result<std::optional<ProcessExit>> ask(pid_t pid, int options) {
  siginfo_t info{};
  int got = 0;
  do {
    got = ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | options);
  } while (got != 0 && errno == EINTR);
  if (got == 0 && info.si_pid == 0) return std::optional<ProcessExit>();
  if (got != 0) {
    return Status(Code::internal,
                  "process " + std::to_string(pid) + " cannot be waited for: " + errno_text(errno) +
                      "; somebody else collected it, or SIGCHLD is ignored in this process");
  }
  ProcessExit exit;
  (info.si_code == CLD_EXITED ? exit.code : exit.signal) = info.si_status;
  exit.dumped_core = info.si_code == CLD_DUMPED;
  return std::optional(exit);
}

/// Whether a program that could not be executed cannot be later either: not for the want of memory,
/// nor while a process writes it.
bool lasts(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EACCES:
    case EPERM:
    case ENOEXEC:
    case ELOOP:
    case ENAMETOOLONG: return true;
    default: return false;
  }
}

}  // namespace

Result<std::optional<ProcessExit>> reap(pid_t pid) { return ask(pid, 0); }
Result<std::optional<ProcessExit>> look_at_end(pid_t pid) { return ask(pid, WNOWAIT); }

void die_with_parent(pid_t parent, int signal) {
  ::prctl(PR_SET_PDEATHSIG, signal);  // fails only for a number that is no signal
  if (::getppid() != parent) ::_exit(1);
}

namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

struct ChildPlan {
  const char* file;
  char* const* arguments;
  char* const* environment;
  int in, out, err;
  const int* passed_on;  // ends with -1
  int verdict;           // pipe end that a successful exec closes; carries errno on failure,
                         // negative if it could not be bound
  const sigset_t* mask;
  const cpu_set_t* threads;
  std::size_t threads_bytes;  // 0: it stays where the launcher may run
};

/// As large as the kernel's own mask can be.
struct ThreadMask {
  static constexpr std::size_t kBits = 1 << 13;
  alignas(cpu_set_t) std::array<unsigned char, kBits / 8> bytes{};
  explicit ThreadMask(const std::vector<int>& threads) {
    for (const int thread : threads) {
      if (thread >= 0 && static_cast<std::size_t>(thread) < kBits)
        CPU_SET_S(static_cast<std::size_t>(thread), bytes.size(),
                  reinterpret_cast<cpu_set_t*>(bytes.data()));
    }
  }
};

[[noreturn]] void give_up(const ChildPlan& plan, int sign = 1) {
  const int error = errno * sign;
  [[maybe_unused]] const ssize_t written = ::write(plan.verdict, &error, sizeof error);
  ::_exit(127);
}

// Between fork and exec: only calls that are safe in a copy of a process with threads.
[[noreturn]] void run_child(const ChildPlan& plan, pid_t parent) {
  die_with_parent(parent, SIGKILL);
  ::setpgid(0, 0);
  // An ignored SIGHUP (nohup) stays ignored in the program. Other ignored signals would only keep
  // it from being ended.
  for (int signal = 1; signal < 32; ++signal) {
    if (signal != SIGKILL && signal != SIGSTOP && signal != SIGHUP) ::signal(signal, SIG_DFL);
  }
  ::sigprocmask(SIG_SETMASK, plan.mask, nullptr);
  if (plan.threads_bytes > 0 && ::sched_setaffinity(0, plan.threads_bytes, plan.threads) != 0)
    give_up(plan, -1);
  // The three streams are above 2 (see start_worker), so that no dup2 overwrites one that is still
  // needed.
  if (plan.in >= 0 && ::dup2(plan.in, 0) < 0) give_up(plan);
  if (::dup2(plan.out, 1) < 0 || ::dup2(plan.err, 2) < 0) give_up(plan);
  // Close-on-exec for descriptors that a library left inheritable. The verdict pipe must stay open
  // until exec.
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int* each = plan.passed_on; *each >= 0; ++each) {
    if (::fcntl(*each, F_SETFD, 0) != 0) give_up(plan);
  }
  ::execve(plan.file, plan.arguments, plan.environment);
  give_up(plan);
}

Result<Descriptor> duplicate_above_streams(int fd) {
  Descriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy)
    return Status(Code::exhausted,
                  "no file descriptor is left for a worker's streams: " + errno_text(errno));
  return copy;
}

bool executable_file(const std::string& path) {
  struct stat file {};
  return ::stat(path.c_str(), &file) == 0 && S_ISREG(file.st_mode) &&
         ::access(path.c_str(), X_OK) == 0;
}

}  // namespace

Result<std::string> find_program(const std::string& program) {
  if (program.find('/') != std::string::npos) return program;
  const char* path = ::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + program;
    if (executable_file(candidate)) return candidate;
  }
  std::string message = "program \"" + program + "\" was not found on PATH";
  if (::access(program.c_str(), F_OK) == 0)
    message += "; for the file in this directory say ./" + program;
  return Status(Code::invalid_argument, message);
}

Result<StartedWorker> start_worker(const WorkerCommand& command, const sigset_t& mask,
                                   int* exit_code) {
  *exit_code = 126;
  int verdict[2];
  if (::pipe2(verdict, O_CLOEXEC) != 0)
    return Status(Code::exhausted, "cannot start a worker: no pipe: " + errno_text(errno));
  Descriptor verdict_in(verdict[0]), verdict_out(verdict[1]);
  auto out = duplicate_above_streams(command.out);
  if (!out) return out.status();
  auto err = duplicate_above_streams(command.err);
  if (!err) return err.status();
  Descriptor in(command.quiet_input ? ::open("/dev/null", O_RDONLY | O_CLOEXEC) : -1);
  if (!command.quiet_input && command.in >= 0) {
    auto copy = duplicate_above_streams(command.in);
    if (!copy) return copy.status();
    in = std::move(*copy);
  }
  const auto arguments = pointers(command.arguments);
  const auto environment = pointers(command.environment);
  std::vector<int> passed_on = command.passed_on;
  std::erase(passed_on, -1);
  passed_on.push_back(-1);
  const ThreadMask threads(command.threads);
  const ChildPlan plan{command.file.c_str(),
                       arguments.data(),
                       environment.data(),
                       in.get(),
                       out->get(),
                       err->get(),
                       passed_on.data(),
                       verdict_out.get(),
                       &mask,
                       reinterpret_cast<const cpu_set_t*>(threads.bytes.data()),
                       command.threads.empty() ? 0 : threads.bytes.size()};

  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0)
    return Status(Code::exhausted,
                  "cannot start a worker: fork: " + errno_text(errno) + "; see `ulimit -u`");
  if (pid == 0) run_child(plan, parent);
  verdict_out.reset();
  ::setpgid(pid, pid);  // in parent and child, so that the group exists before either signals it
  int error = 0;
  ssize_t got = 0;
  do {
    got = ::read(verdict_in.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof error) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    *exit_code = error == ENOENT ? 127 : 126;
    if (error < 0)
      return Status(Code::invalid_argument, "a worker cannot be bound to its cores: " +
                                                errno_text(-error) + "; see --bind-to");
    std::string message =
        "program \"" + command.file + "\" cannot be executed: " + errno_text(error);
    if (error == ENOEXEC) message += "; a script needs a first line such as #!/bin/sh";
    return Status(lasts(error) ? Code::invalid_argument : Code::aborted, message);
  }
  auto pidfd = open_pidfd(pid);
  if (!pidfd) {
    ::kill(pid, SIGKILL);
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return pidfd.status();
  }
  return StartedWorker{pid, std::move(*pidfd)};
}

}  // namespace muster::launch
