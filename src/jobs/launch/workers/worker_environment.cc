#include "jobs/launch/workers/worker_environment.h"

#include <unistd.h>

#include "core/base/process/launcher_socket.h"
#include "jobs/launch/workers/worker_news.h"

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
  result.erase("MUSTER_LAUNCH");
  result.erase(kLauncherSocketVariable);
  result.erase(kSpareVariable);
  if (job.epoch > 0) result["MUSTER_EPOCH"] = std::to_string(job.epoch);
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

}  // namespace muster::launch
