// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/worker_commands.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "core/base/process/launcher_socket.h"
#include "core/net/socket_address.h"
#include "core/security/own_files.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/process.h"
#include "jobs/launch/workers/worker_notices.h"

namespace muster::launch {

Environment inherited_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos)
      result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

Environment worker_environment(const Environment& inherited, const JobEnvironment& job,
                               const WorkerRanks& ranks, int restart_count) {
  Environment result = inherited;
  result["RANK"] = std::to_string(ranks.rank);
  result["WORLD_SIZE"] = std::to_string(ranks.world_size);
  result["LOCAL_RANK"] = std::to_string(ranks.local_rank);
  result["LOCAL_WORLD_SIZE"] = std::to_string(ranks.local_world_size);
  result["GROUP_RANK"] = std::to_string(ranks.group_rank);
  result["GROUP_WORLD_SIZE"] = std::to_string(ranks.group_world_size);
  result["ROLE_RANK"] = std::to_string(ranks.role_rank);
  result["ROLE_WORLD_SIZE"] = std::to_string(ranks.role_world_size);
  result["ROLE_NAME"] = job.role;
  result["MASTER_ADDR"] = job.master_addr;
  result["MASTER_PORT"] = std::to_string(job.master_port);
  result["TORCHELASTIC_RESTART_COUNT"] = std::to_string(restart_count);
  result["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(job.max_restarts);
  result["TORCHELASTIC_RUN_ID"] = job.run_id;
  result["PYTHON_EXEC"] = job.python;
  // An outer launcher's variable would make the workers use its store.
  result.erase("TORCHELASTIC_USE_AGENT_STORE");
  result.erase("MUSTER_AGENT_STORE");
  result.erase("MUSTER_EPOCH");
  result.erase("MUSTER_COMMITTED");
  result.erase("MUSTER_STATE_EPOCH");
  result.erase("MUSTER_ON_LOST_STATE");
  result.erase("MUSTER_LAUNCH");
  result.erase(kLauncherSocketVariable);
  result.erase(kSpareVariable);
  if (job.epoch > 0) result["MUSTER_EPOCH"] = std::to_string(job.epoch);
  if (job.committed > 0) result["MUSTER_COMMITTED"] = std::to_string(job.committed);
  if (job.state_in > 0) result["MUSTER_STATE_EPOCH"] = std::to_string(job.state_in);
  if (job.fail_without_state) result["MUSTER_ON_LOST_STATE"] = "fail";
  if (!job.launch.empty()) result["MUSTER_LAUNCH"] = job.launch;
  if (job.agent_store) result["MUSTER_AGENT_STORE"] = *job.agent_store;
  if (job.secret_place) {
    result.erase("MUSTER_SECRET");  // must not be visible in a worker's environment
    result["MUSTER_SECRET_FD"] = *job.secret_place;
  }
  if (job.threads) result.emplace("OMP_NUM_THREADS", std::to_string(*job.threads));
  return result;
}

std::vector<std::string> flatten(const Environment& environment) {
  std::vector<std::string> result;
  result.reserve(environment.size());
  for (const auto& [name, value] : environment) result.emplace_back(name).append("=").append(value);
  return result;
}

namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Empty if it cannot be executed.
std::string executable(const fs::path& program) {
  return ::access(program.c_str(), X_OK) == 0 ? program.string() : std::string();
}

/// The Python of a virtual environment; empty if `folder` is none.
std::string python_in(const fs::path& folder) {
  return is_there(folder / "pyvenv.cfg") ? executable(folder / "bin/python3") : std::string();
}

std::string variable(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

/// As `python_in`, for a folder that nobody has named: another user may have laid it.
std::string found_python_in(const fs::path& folder) {
  const std::string python = python_in(folder);
  const bool trusted = !python.empty() && is_trusted_place((folder / "pyvenv.cfg").string()) &&
                       is_trusted_place(python);
  return trusted ? python : std::string();
}

/// The source tree of <tree>/build/<preset>/bin/<program>; empty for any other layout.
std::string python_of_tree(const fs::path& own_program) {
  const fs::path tree = own_program.parent_path().parent_path().parent_path().parent_path();
  return is_there(tree / "tools/setup") && is_trusted_place((tree / "tools/setup").string())
             ? found_python_in(tree / ".venv")
             : std::string();
}

bool lacks(const std::string& last_words, const std::string& module) {
  const std::string said = "No module named '" + module;
  return last_words.find(said + "'") != std::string::npos ||
         last_words.find(said + ".") != std::string::npos;
}

}  // namespace

std::vector<PythonPlace> python_places(const Environment& environment,
                                       const std::string& own_program) {
  const std::string active = variable(environment, "VIRTUAL_ENV"),
                    conda = variable(environment, "CONDA_PREFIX");
  const bool chosen = !conda.empty() && variable(environment, "CONDA_DEFAULT_ENV") != "base";
  const auto on_path = find_program("python3");
  return {{"PYTHON_EXEC", variable(environment, "PYTHON_EXEC")},
          {"MUSTER_PYTHON", variable(environment, "MUSTER_PYTHON")},
          {"the virtual environment of this command",
           found_python_in(fs::path(own_program).parent_path().parent_path())},
          {"VIRTUAL_ENV", active.empty() ? std::string() : python_in(active)},
          {"CONDA_PREFIX", chosen ? executable(fs::path(conda) / "bin/python3") : std::string()},
          {".venv of the source tree around this command", python_of_tree(own_program)},
          {"python3 on PATH", on_path ? *on_path : std::string()}};
}

Result<std::string> first_python(const std::vector<PythonPlace>& places) {
  for (const PythonPlace& place : places) {
    if (!place.python.empty()) return place.python;
  }
  return Status(Code::invalid_argument,
                "there is no Python; looked at, in this order: " + describe(places) +
                    "; install python3, or say in MUSTER_PYTHON which one to take");
}

std::string describe(const std::vector<PythonPlace>& places) {
  std::string text;
  for (const PythonPlace& place : places)
    text += (text.empty() ? "" : ", ") + place.name + " (" +
            (place.python.empty() ? "none" : place.python) + ")";
  return text;
}

std::string explain_missing_module(const std::string& last_words,
                                   const std::vector<PythonPlace>& places,
                                   const std::string& own_program) {
  const auto python = first_python(places);
  const bool torch = lacks(last_words, "torch"), muster = lacks(last_words, "muster");
  if (!python || (!torch && !muster)) return {};
  std::string text = *python + " ran the program, the first of " + describe(places);
  if (torch) return text + "; say in MUSTER_PYTHON which Python has torch";
  const fs::path built = fs::path(own_program).parent_path().parent_path() / "python";
  text += "; install muster there (pip install its wheel, or pip install . in a clone)";
  return is_trusted_place((built / "muster").string())
             ? text + ", or set PYTHONPATH=" + built.string()
             : text;
}

void WorkerCommands::set_program(const Program& program) {
  program_ = program;
  const auto python = first_python(program.pythons);
  job.python = python ? *python : "python3";
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
  if (options_.cpus.empty())
    return command_in(worker_environment(inherited_, job, ranks, restarts), local_rank, error_file);
  const WorkerCpus& cpus = options_.cpus[static_cast<std::size_t>(local_rank)];
  JobEnvironment bound = job;
  bound.threads = cpus.cores;
  WorkerCommand command =
      command_in(worker_environment(inherited_, bound, ranks, restarts), local_rank, error_file);
  command.threads = cpus.threads;
  return command;
}

WorkerCommand WorkerCommands::spare_command(const std::string& error_file) const {
  Environment environment = worker_environment(inherited_, job, {}, 0);
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
