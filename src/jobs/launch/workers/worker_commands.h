// SPDX-License-Identifier: BSD-3-Clause
/// The workers' command lines, environments and Python on this node.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/process.h"
#include "muster/status.h"

namespace muster::launch {

/// The same for all workers of a job on one node.
struct JobEnvironment {
  std::string master_addr;
  std::uint16_t master_port = 0;
  std::string run_id;
  std::string role;
  int max_restarts = 0;
  std::optional<std::string>
      agent_store{};   ///< HOST:PORT of the launcher's store; absent: it serves none
  std::string python;  ///< PYTHON_EXEC
  std::optional<std::string> secret_place{};  ///< MUSTER_SECRET_FD, replacing variables that
                                              ///< hold a secret; absent: whatever is inherited
  std::int64_t epoch = 0;           ///< MUSTER_EPOCH; 0: the nodes of the job do not change
  std::string launch{};             ///< MUSTER_LAUNCH, with an epoch
  std::int64_t committed = 0;       ///< MUSTER_COMMITTED; 0: none
  std::int64_t state_in = 0;        ///< MUSTER_STATE_EPOCH; 0: none
  bool fail_without_state = false;  ///< MUSTER_ON_LOST_STATE
  std::optional<int> threads{};     ///< OMP_NUM_THREADS where the user has set none
};

using Environment = std::map<std::string, std::string>;

/// This process's environment.
Environment inherited_environment();
/// `inherited` plus torchrun's variables, MUSTER_AGENT_STORE and MUSTER_SECRET_FD.
Environment worker_environment(const Environment& inherited, const JobEnvironment& job,
                               const WorkerRanks& ranks, int restart_count);

/// "NAME=value" strings for exec.
std::vector<std::string> flatten(const Environment& environment);

// Chooses the Python that runs Python programs.

/// One place where a Python may be.
struct PythonPlace {
  std::string name;    ///< "MUSTER_PYTHON", "python3 on PATH"
  std::string python;  ///< empty: there is none
};

/// In order of precedence: PYTHON_EXEC, MUSTER_PYTHON, the virtual environment in which
/// `own_program` is installed, the activated one (VIRTUAL_ENV, or CONDA_PREFIX unless it is conda's
/// "base"), the `.venv` of the source tree in which `own_program` was built, and python3 on PATH.
/// The value of a variable is not checked: a wrong path must be an error and not select another
/// Python. Places that nobody has named count only where no other user can write
/// (`core/security/trusted_place.h`).
std::vector<PythonPlace> python_places(const Environment& environment,
                                       const std::string& own_program);

/// The first Python that exists. Code::invalid_argument with `describe(places)` if there is none.
Result<std::string> first_python(const std::vector<PythonPlace>& places);

/// "PYTHON_EXEC (none), ..., python3 on PATH (/usr/bin/python3)".
std::string describe(const std::vector<PythonPlace>& places);

/// Advice for a program whose standard error ended with `tail`, if a module was missing: which
/// Python ran it, why that one, and where the module may be. Empty for other failures.
std::string explain_missing_module(const std::string& last_words,
                                   const std::vector<PythonPlace>& places,
                                   const std::string& own_program);

struct Program {
  std::vector<PythonPlace> pythons;
  bool is_python = false;  ///< the first of `pythons` runs it
  std::string file;
  /// arguments[0] and the arguments before the user's own.
  std::vector<std::string> before;
};
/// Finds the program, and the Python that runs it if it needs one.
Result<Program> resolve_program(const RunOptions& options);

class WorkerCommands {
 public:
  /// `options` must outlive it.
  explicit WorkerCommands(const RunOptions& options) : options_(options) {}

  void set_program(const Program& program);
  const Program& program() const { return program_; }
  /// `error_file`: where the worker may leave its exception; empty: nowhere.
  WorkerCommand command_of(const WorkerRanks& ranks, int local_rank, int restarts,
                           const std::string& error_file) const;
  /// A spare process: it has no ranks before it is told them.
  WorkerCommand spare_command(const std::string& error_file) const;

  JobEnvironment job;

 private:
  WorkerCommand command_in(Environment environment, int local_rank,
                           const std::string& error_file) const;
  const RunOptions& options_;
  Program program_;
  Environment inherited_ = inherited_environment();
};

}  // namespace muster::launch
