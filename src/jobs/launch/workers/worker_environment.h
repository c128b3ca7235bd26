/// A worker's environment variables.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "jobs/launch/node/rank_assignment.h"

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
  std::int64_t epoch = 0;        ///< MUSTER_EPOCH; 0: the nodes of the job do not change
  std::string launch{};          ///< MUSTER_LAUNCH, with an epoch
  std::optional<int> threads{};  ///< OMP_NUM_THREADS where the user has set none
};

using Environment = std::map<std::string, std::string>;

/// This process's environment.
Environment inherited_environment();
/// `inherited` plus torchrun's variables, MUSTER_AGENT_STORE and MUSTER_SECRET_FD.
Environment worker_environment(const Environment& inherited, const JobEnvironment& job,
                               const WorkerRanks& ranks, int restart_count);

/// "NAME=value" strings for exec.
std::vector<std::string> flatten(const Environment& environment);

}  // namespace muster::launch
