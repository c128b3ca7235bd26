/// Child processes: how one ended, in words, and a descriptor that becomes readable when it ends.
///
/// `launch/` holds the agent that starts, watches and ends workers (`agent_machine.h` decides,
/// `agent.h` acts), the workers' environment (`worker_environment.h`, `rank_assignment.h`,
/// `node_rendezvous.h`), their output (`output.h`), `spawn.h` for a function in n processes or
/// threads, and `environment.h` for other launchers. May include base/ and store/. Test it alone:
/// `ctest -R launch`.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

/// How a process ended.
struct ProcessExit {
  int code = 0;    ///< exit code; 0 if a signal ended it
  int signal = 0;  ///< 0: it exited by itself
  bool dumped_core = false;

  bool success() const { return code == 0 && signal == 0; }
  /// The shell's exit status: the exit code, or 128 + signal.
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  /// By another process: no error of its own, which another rank's end may have caused.
  bool was_killed() const { return signal == SIGKILL; }
  friend bool operator==(const ProcessExit&, const ProcessExit&) = default;
};

/// "SIGTERM", "SIGRTMIN+3", "signal 99".
std::string signal_name(int signal);
/// "exit code 3", "SIGKILL (signal 9: Killed)".
std::string describe(const ProcessExit& exit);

/// Close-on-exec descriptor that polls readable once the child has ended.
Result<Descriptor> open_pidfd(pid_t pid);
/// Reaps a child that has ended; absent while it runs. Code::internal if `pid` is not a child of
/// this process.
Result<std::optional<ProcessExit>> reap(pid_t pid);
/// The same without reaping it: it stays a zombie, so its pid and process group id are not reused.
Result<std::optional<ProcessExit>> look_at_end(pid_t pid);
/// In a freshly forked child: requests `signal` when the thread that forked it ends. `parent` is
/// the pid of the forking process; if it has already ended, the child exits at once.
/// Async-signal-safe.
void die_with_parent(pid_t parent, int signal);

}  // namespace muster::launch
