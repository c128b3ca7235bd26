// SPDX-License-Identifier: BSD-3-Clause
/// Child processes: how one ended, in words, and a descriptor that becomes readable when it ends.
///
/// `launch/` holds the launcher that starts, watches and ends workers (`launcher_machine.h`
/// decides, `launcher.h` acts), the workers' environment (`worker_commands.h`, `rank_assignment.h`,
/// `node_rendezvous.h`), their output (`worker_output.h`), the nodes that ssh starts
/// (`hosts/remote_nodes.h`), `spawn.h` for a function in n processes or threads, and
/// `environment.h` for other launchers. May include base/ and store/. Test it
/// alone: `ctest -R launch`.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/time/clock.h"
#include "muster/clock.h"
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

// How long processes that were told to end have before they are killed. Time in which this process
// stood still counts for no process: they may have stood still with it (a suspended machine,
// Ctrl-Z), or have ended meanwhile, unseen.

class EndingGrace {
 public:
  EndingGrace(const Clock& clock, Duration time)
      : clock_(clock), time_(time), deadline_(deadline_after(clock, time)) {}

  /// When to ask `is_over`.
  TimePoint deadline() const { return deadline_; }
  /// To be asked after looking at who has ended. After a pause of this process the time begins
  /// anew.
  bool is_over() {
    const TimePoint now = clock_.now();
    if (now < deadline_) return false;
    if (!pauses_.excuse(now - deadline_, kSlack)) return true;
    deadline_ = deadline_after(clock_, time_);
    return false;
  }

 private:
  static constexpr Duration kSlack =
      std::chrono::seconds(1);  // limit: no process that runs is later

  const Clock& clock_;
  const Duration time_;
  TimePoint deadline_;
  OwnPauses pauses_;
};

// One worker process: what to run, starting it, and its three descriptors.

struct WorkerCommand {
  std::string file;                      ///< resolved: no PATH is searched
  std::vector<std::string> arguments;    ///< arguments[0] included
  std::vector<std::string> environment;  ///< "NAME=value"
  /// Targets of the streams: a file or a pipe's writing end. Not owned.
  int out = 1;
  int err = 2;
  bool quiet_input = false;      ///< standard input is /dev/null; else `in`
  std::vector<int> passed_on{};  ///< descriptors that it inherits under their numbers; not owned
  std::vector<int> threads{};    ///< hardware threads that it may run on; empty: the launcher's
  int in = -1;                   ///< standard input; -1: inherited. Not owned.
};

struct StartedWorker {
  pid_t pid = -1;  ///< also its process group
  Descriptor pidfd;
};

/// Starts the worker in a process group of its own, with the signal mask `mask` and default signal
/// actions (an ignored SIGHUP stays ignored). It inherits only the three streams and `passed_on`,
/// and gets SIGKILL when the calling thread ends. Fails with Code::invalid_argument if the program
/// can never be executed, with Code::aborted if it cannot be now (no memory, being written);
/// `exit_code` is then the shell's (127 not found, 126 otherwise).
Result<StartedWorker> start_worker(const WorkerCommand& command, const sigset_t& mask,
                                   int* exit_code);

/// The file that a shell would run for `program`: itself if it has a slash, else found on PATH.
/// Errors list the folders searched.
Result<std::string> find_program(const std::string& program);

}  // namespace muster::launch
