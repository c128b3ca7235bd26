#include "muster/base/scheduler.h"

#include <unistd.h>

#include <charconv>

#include "muster/base/control_group.h"
#include "muster/base/process_start.h"

namespace muster {
namespace {

using Job = std::string (*)(const VariableOf&);

struct Dialect {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  const char* node;
  Job job;
};

std::optional<int> number(const VariableOf& variable, const char* name) {
  const auto text = *name == '\0' ? std::nullopt : variable(name);
  int value = 0;
  if (!text) return {};
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  return error == std::errc() && stop == end && value >= 0 ? std::optional(value) : std::nullopt;
}

std::string job_of_slurm(const VariableOf& variable) {
  const auto job = variable("SLURM_JOB_ID"), step = variable("SLURM_STEP_ID");
  return job && step ? "slurm " + *job + "." + *step : std::string();
}

std::string job_of_pmix(const VariableOf& variable) {
  const auto job = variable("PMIX_NAMESPACE");
  return job ? "pmix " + *job : std::string();
}

/// Hydra, the launcher of MPICH and its kin, tells ranks no name of their job; but all of a host
/// descend from one process of it. Where there is none, srun has started them and speaks PMI.
std::string job_of_pmi(const VariableOf& variable) {
  for (pid_t process = ::getppid(); process > 1;) {
    const auto stat =
        small_file("/proc/" + std::to_string(process) + "/stat");  // number (name) state parent ...
    const auto open = stat ? stat->find('(') : std::string::npos,
               close = stat ? stat->rfind(')') : std::string::npos;
    if (open == std::string::npos || close == std::string::npos || close + 4 > stat->size()) break;
    if (stat->substr(open + 1, close - open - 1) == "hydra_pmi_proxy") {
      const auto start = process_start(process);
      return start ? "hydra " + std::to_string(process) + " " + std::to_string(*start)
                   : std::string();
    }
    pid_t parent = 0;
    std::from_chars(stat->data() + close + 4, stat->data() + stat->size(), parent);
    process = parent;
  }
  return job_of_slurm(variable);
}

constexpr Dialect kDialects[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "", job_of_pmix},
    {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "", job_of_pmi},
    {"MPICH (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", job_of_pmi},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
     "SLURM_NODEID", job_of_slurm},
};

bool is_batch_script(const VariableOf& variable) {
  return variable("SLURM_JOB_ID") && !variable("SLURM_STEP_ID") && !variable("SLURM_STEPID");
}

/// Slurm's size is the step's: what an allocation's interactive shell runs is a step of one task.
std::optional<int> world_size_of(const Dialect& dialect, const VariableOf& variable) {
  if (dialect.job == job_of_slurm) {
    if (const auto step = number(variable, "SLURM_STEP_NUM_TASKS")) return step;
  }
  return number(variable, dialect.world_size);
}

/// Slurm's tasks per node are a limit that srun may stay below, and say nothing of where ranks are.
bool is_one_host(const Dialect& dialect, const SchedulerRanks& found, const VariableOf& variable) {
  if (dialect.job != job_of_slurm && found.local_world_size)
    return found.local_world_size == found.world_size;
  const auto step = number(variable, "SLURM_STEP_NUM_NODES");
  return (step ? step : number(variable, "SLURM_NNODES")) == 1;
}

}  // namespace

std::optional<SchedulerRanks> detect_scheduler(const VariableOf& variable) {
  for (const Dialect& dialect : kDialects) {
    const auto rank = number(variable, dialect.rank), world_size = world_size_of(dialect, variable);
    if (!rank || !world_size || *rank >= *world_size) continue;
    if (dialect.job == job_of_slurm && is_batch_script(variable)) continue;
    SchedulerRanks found;
    found.name = dialect.name;
    found.rank = *rank;
    found.world_size = *world_size;
    found.local_rank = number(variable, dialect.local_rank);
    found.local_world_size = number(variable, dialect.local_world_size);
    found.node = number(variable, dialect.node);
    found.one_host = is_one_host(dialect, found, variable);
    found.job = dialect.job(variable);
    return found;
  }
  return {};
}

}  // namespace muster
