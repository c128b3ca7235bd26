/// Ranks given by other people's launchers: Slurm, MPI, PMI.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "muster/base/env.h"

namespace muster {

struct SchedulerRanks {
  std::string name;  ///< "Slurm", "Open MPI", ...
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank, local_world_size, node;
  bool one_host = false;  ///< all ranks are known to be on this host
  std::string job;  ///< the same text on all ranks of this launch on this host, another for every
                    ///< launch; empty: not known

  /// Ranks that need to be told no address.
  bool can_meet_on_this_host() const { return one_host && !job.empty(); }
};

/// The text of a variable; none where it is unset or empty.
using VariableOf = std::function<std::optional<std::string>(const char* name)>;

/// What the environment says of this process, from the first launcher whose variables are all there
/// and make sense. MPI's come before Slurm's, which stay set in what an allocation's shell runs. A
/// process that a batch script starts without srun is none of Slurm's ranks.
std::optional<SchedulerRanks> detect_scheduler(const VariableOf& variable = env_text);

}  // namespace muster
