#include "jobs/launch/workers/process.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

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

}  // namespace

Result<std::optional<ProcessExit>> reap(pid_t pid) { return ask(pid, 0); }
Result<std::optional<ProcessExit>> look_at_end(pid_t pid) { return ask(pid, WNOWAIT); }

void die_with_parent(pid_t parent, int signal) {
  ::prctl(PR_SET_PDEATHSIG, signal);  // fails only for a number that is no signal
  if (::getppid() != parent) ::_exit(1);
}

}  // namespace muster::launch
