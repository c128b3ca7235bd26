/// The workers' command lines and environments on this node.
#pragma once

#include <string>
#include <vector>

#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/python.h"
#include "jobs/launch/workers/worker.h"
#include "jobs/launch/workers/worker_environment.h"

namespace muster::launch {

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

  JobEnvironment told;

 private:
  WorkerCommand command_in(Environment environment, int local_rank,
                           const std::string& error_file) const;
  const RunOptions& options_;
  Program program_;
  Environment inherited_ = inherited_environment();
};

}  // namespace muster::launch
