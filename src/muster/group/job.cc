#include "muster/group/job.h"

#include <algorithm>
#include <utility>

#include "muster/base/env.h"
#include "muster/base/secret.h"
#include "muster/collective/communicator.h"
#include "muster/collective/op.h"
#include "muster/group/backends/native.h"
#include "muster/group/errors.h"
#include "muster/transport/factory.h"

namespace muster::group {
namespace {

bool is_native(const Backend& backend) { return backend == Backend::NATIVE || backend == Backend::GLOO || backend == Backend::TCP; }

/// Whether the job's CPU tensors may go through shared memory.
bool shares_memory(const BackendConfig& config) {
  const auto backend = config.for_device(c10::DeviceType::CPU);
  return !backend || !(*backend == Backend::TCP);
}

std::vector<std::string> interfaces_from_environment() {
  auto text = env_text("MUSTER_SOCKET_IFNAME");
  if (!text) text = env_text("GLOO_SOCKET_IFNAME");
  std::vector<std::string> names;
  if (!text) return names;
  for (std::size_t at = 0; at <= text->size();) {
    const auto end = std::min(text->find(',', at), text->size());
    if (end > at) names.push_back(text->substr(at, end - at));
    at = end + 1;
  }
  return names;
}

/// What must be the same on every rank, as people read it.
void compare_with_others(const store::Rendezvous& found, const BackendConfig& config, std::size_t interfaces, Duration timeout) {
  const auto mine = "backend '" + config.text() + "' and " + std::to_string(interfaces) + " network interfaces";
  auto all = found.store->all_gather("arrived", found.rank, found.world_size, mine, timeout);
  if (!all.ok())
    raise_from_store(all.status().with_context("init_process_group: rank " + std::to_string(found.rank) + " waits for the others"));
  for (int rank = 0; rank < found.world_size; ++rank) {
    const auto& theirs = (*all)[static_cast<std::size_t>(rank)];
    if (theirs == all->front()) continue;
    throw DistError("init_process_group: rank 0 came with " + all->front() + ", rank " + std::to_string(rank) + " with " + theirs +
                        "; give every rank the same backend and the same number of names in MUSTER_SOCKET_IFNAME",
                    Code::mismatch, {rank});
  }
}

std::shared_ptr<ProcessGroupBackend> make_backend(const Job& job, const Backend& backend, const std::string& name,
                                                  const std::vector<int>& ranks, Duration timeout) {
  if (!is_native(backend))
    throw DistBackendError("backend '" + std::string(backend) + "' is not in this build of muster", Code::unsupported);
  collective::CommunicatorOptions options;
  options.name = name;
  options.timeout = timeout;
  options.use_region = !(backend == Backend::TCP);
  return std::make_shared<NativeBackend>(backend, take(collective::Communicator::create(job.fabric, ranks, std::move(options))));
}

}  // namespace

std::shared_ptr<Job> open_job(store::Rendezvous found, const BackendConfig& config, Duration timeout) {
  auto interfaces = interfaces_from_environment();
  compare_with_others(found, config, interfaces.size(), timeout);

  transport::ConnectorOptions connector;
  connector.rank = found.rank;
  connector.world_size = found.world_size;
  connector.job = found.job;
  connector.shared_memory = shares_memory(config);
  connector.interfaces = std::move(interfaces);
  connector.towards = found.host;

  transport::FabricOptions fabric;
  fabric.rank = found.rank;
  fabric.world_size = found.world_size;
  fabric.timeout = timeout;
  fabric.rules = &collective::fingerprint_rules();

  auto exchange = transport::exchange_over(found.store, "fabric", found.rank, found.world_size, timeout);
  auto job = std::make_shared<Job>();
  job->rank = found.rank;
  job->world_size = found.world_size;
  job->name = found.job;
  job->store = std::move(found.store);
  job->fabric = take(transport::Fabric::create(
      fabric, transport::make_socket_connector(std::move(connector), take(Secret::from_environment())), exchange));
  return job;
}

Group make_group(const std::shared_ptr<Job>& job, std::string name, std::vector<int> ranks, BackendConfig config, Duration timeout) {
  ProcessGroupParts parts;
  const auto me = std::find(ranks.begin(), ranks.end(), job->rank);
  if (me != ranks.end()) {
    parts.rank = static_cast<int>(me - ranks.begin());
    std::vector<std::pair<Backend, std::shared_ptr<ProcessGroupBackend>>> made;
    for (const auto& [device, backend] : config.entries()) {
      auto at = std::find_if(made.begin(), made.end(), [&name = backend](const auto& entry) { return entry.first == name; });
      if (at == made.end()) at = made.emplace(made.end(), backend, make_backend(*job, backend, name, ranks, timeout));
      parts.backends.emplace_back(device, at->second);
    }
  }
  parts.name = std::move(name);
  parts.ranks = std::move(ranks);
  parts.config = std::move(config);
  parts.timeout = timeout;
  return std::make_shared<ProcessGroup>(std::move(parts));
}

}  // namespace muster::group
