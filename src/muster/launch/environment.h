/// Ranks given by other people's launchers: Slurm, MPI, PMI.
#pragma once

#include <optional>
#include <string>

#include "muster/launch/worker_environment.h"

namespace muster::launch {

struct SchedulerRanks {
  std::string name;  ///< "Slurm", "Open MPI", ...
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank, local_world_size, node;
};

/// What the environment says of this process, from the first launcher whose variables are all there and make sense. MPI's come before
/// Slurm's, which stay set in what an allocation's shell runs.
std::optional<SchedulerRanks> detect_scheduler(const Environment& environment);
/// For this process's environment.
std::optional<SchedulerRanks> detect_scheduler();

}  // namespace muster::launch
