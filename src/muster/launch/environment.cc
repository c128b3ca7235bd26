#include "muster/launch/environment.h"

#include "muster/launch/options.h"

namespace muster::launch {
namespace {

struct Dialect {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  const char* node;
};

constexpr Dialect kDialects[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""},
    {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", ""},
    {"MPICH (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID"},
};

std::optional<int> number(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  if (found == environment.end()) return {};
  auto value = parse_whole(name, found->second, 0, 1 << 30);
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

}  // namespace

std::optional<SchedulerRanks> detect_scheduler(const Environment& environment) {
  for (const Dialect& dialect : kDialects) {
    const auto rank = number(environment, dialect.rank);
    const auto world_size = number(environment, dialect.world_size);
    if (!rank || !world_size || *rank >= *world_size) continue;
    return SchedulerRanks{dialect.name,
                          *rank,
                          *world_size,
                          number(environment, dialect.local_rank),
                          number(environment, dialect.local_world_size),
                          number(environment, dialect.node)};
  }
  return {};
}

std::optional<SchedulerRanks> detect_scheduler() { return detect_scheduler(inherited_environment()); }

}  // namespace muster::launch
