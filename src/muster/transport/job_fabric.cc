#include "muster/transport/job_fabric.h"

#include <algorithm>
#include <utility>

#include "muster/base/env.h"
#include "muster/base/secret.h"
#include "muster/transport/factory.h"

namespace muster::transport {

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

Result<std::unique_ptr<Fabric>> join_fabric(const store::Rendezvous& found, const JobFabricOptions& options) {
  auto secret = Secret::from_environment();
  if (!secret) return secret.status();

  ConnectorOptions connector;
  connector.rank = found.rank;
  connector.world_size = found.world_size;
  connector.job = found.job;
  connector.shared_memory = options.shared_memory;
  connector.interfaces = options.interfaces;
  connector.towards = found.host;
  connector.any_host = found.any_host;
  if (options.ring_bytes) connector.ring_bytes = *options.ring_bytes;

  FabricOptions fabric;
  fabric.rank = found.rank;
  fabric.world_size = found.world_size;
  fabric.timeout = options.timeout;
  fabric.deadline = options.deadline;
  fabric.rules = options.rules;

  const auto exchange = exchange_over(found.store, "fabric", found.rank, found.world_size, options.deadline);
  return Fabric::create(fabric, make_socket_connector(std::move(connector), std::move(*secret)), exchange);
}

}  // namespace muster::transport
