/// One worker process: what to run, starting it, and its three descriptors.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

struct WorkerCommand {
  std::string file;                      ///< resolved: no PATH is searched
  std::vector<std::string> arguments;    ///< arguments[0] included
  std::vector<std::string> environment;  ///< "NAME=value"
  /// Where the streams go: a file or a pipe's writing end. Not owned.
  int out = 1;
  int err = 2;
  bool quiet_input = false;      ///< standard input is /dev/null; else inherited
  std::vector<int> passed_on{};  ///< descriptors that it inherits under their numbers; not owned
};

struct StartedWorker {
  pid_t pid = -1;  ///< also its process group
  Descriptor pidfd;
};

/// Starts the worker in a process group of its own, with the signal mask `mask` and default signal
/// actions (an ignored SIGHUP stays ignored). It inherits only the three streams and `passed_on`,
/// and gets SIGKILL when the calling thread ends. Fails with Code::invalid_argument if the program
/// cannot be executed; `exit_code` is then the shell's (127 not found, 126 otherwise).
Result<StartedWorker> start_worker(const WorkerCommand& command, const sigset_t& mask,
                                   int* exit_code);

/// The file that a shell would run for `program`: itself if it has a slash, else found on PATH.
/// Errors list the folders searched.
Result<std::string> find_program(const std::string& program);

}  // namespace muster::launch
