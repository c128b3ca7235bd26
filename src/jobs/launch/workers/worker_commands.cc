#include "jobs/launch/workers/worker_commands.h"

#include <unistd.h>

#include <cerrno>
#include "core/net/socket_address.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/worker_news.h"

namespace muster::launch {

void WorkerCommands::set_program(const Program& program) {
  program_ = program;
  const auto python = first_python(program.pythons);
  told.python = python ? *python : "python3";
}

WorkerCommand WorkerCommands::command_in(Environment environment, int local_rank,
                                         const std::string& error_file) const {
  WorkerCommand command;
  command.file = program_.file;
  command.arguments = program_.before;
  if (options_.local_rank_argument != LocalRankArgument::none) {
    const bool dash = options_.local_rank_argument == LocalRankArgument::dash;
    command.arguments.push_back((dash ? "--local-rank=" : "--local_rank=") +
                                std::to_string(local_rank));
  }
  command.arguments.insert(command.arguments.end(), options_.arguments.begin(),
                           options_.arguments.end());
  environment.erase("TORCHELASTIC_ERROR_FILE");
  if (!error_file.empty()) environment["TORCHELASTIC_ERROR_FILE"] = error_file;
  command.environment = flatten(environment);
  // Several workers must not read from one terminal.
  command.quiet_input = options_.workers > 1 || options_.spares > 0 || ::isatty(0) != 0;
  return command;
}

WorkerCommand WorkerCommands::command_of(const WorkerRanks& ranks, int local_rank, int restarts,
                                         const std::string& error_file) const {
  return command_in(worker_environment(inherited_, told, ranks, restarts), local_rank, error_file);
}

WorkerCommand WorkerCommands::spare_command(const std::string& error_file) const {
  Environment environment = worker_environment(inherited_, told, {}, 0);
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                           "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MUSTER_EPOCH"})
    environment.erase(name);
  environment[kSpareVariable] = "1";
  return command_in(std::move(environment), 0, error_file);
}

Result<Program> resolve_program(const RunOptions& options) {
  Program program;
  program.pythons = python_places(inherited_environment(), own_program());
  program.is_python = is_python(options);
  auto python = first_python(program.pythons);
  if (program.is_python && !python) return python.status();
  auto file = find_program(program.is_python ? *python : options.program);
  if (!file) return file.status();
  program.file = *file;
  program.before = {program.is_python ? *file : options.program};
  if (!program.is_python) return program;
  // Found before any rank starts: each one's Python would say the same.
  if (!options.module && ::access(options.program.c_str(), F_OK) != 0)
    return Status(Code::invalid_argument, "cannot find the program " + options.program + ": " +
                                              errno_text(errno) + "; is its path right?");
  program.before.push_back("-u");
  if (options.replace_gloo) program.before.insert(program.before.end(), {"-m", "muster.torch"});
  if (options.module) program.before.push_back("-m");
  program.before.push_back(options.program);
  return program;
}

}  // namespace muster::launch
