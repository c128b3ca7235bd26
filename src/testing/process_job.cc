// SPDX-License-Identifier: BSD-3-Clause
#include "testing/process_job.h"

#include <numeric>
#include <vector>

#include "core/collective/op.h"
#include "core/store/factory.h"

namespace muster::testing {

Result<ProcessJob> join_process_job(const ProcessJobOptions& options) {
  auto store = store::make_file_store(options.store_path, options.world_size, options.timeout);
  if (!store) return store.status();
  transport::ConnectorOptions connector;
  connector.rank = options.rank;
  connector.world_size = options.world_size;
  connector.job = "test job at " + options.store_path;
  connector.shared_memory = options.shared_memory;
  connector.towards = options.towards;
  connector.host_label = options.host_label;
  transport::FabricOptions fabric_options;
  fabric_options.rank = options.rank;
  fabric_options.world_size = options.world_size;
  fabric_options.timeout = options.timeout;
  fabric_options.heartbeat_limit = options.heartbeat_limit;
  fabric_options.rules = &collective::fingerprint_rules();
  auto fabric = transport::Fabric::create(
      fabric_options, transport::make_socket_connector(connector, Secret::given(options.secret)),
      transport::exchange_over(*store, "fabric", options.rank, options.world_size,
                               deadline_after(steady_clock(), options.timeout)));
  if (!fabric) return fabric.status();
  ProcessJob job;
  job.fabric = std::move(*fabric);
  std::vector<int> members(static_cast<std::size_t>(options.world_size));
  std::iota(members.begin(), members.end(), 0);
  collective::CommunicatorOptions world;
  world.name = "world";
  world.timeout = options.timeout;
  auto communicator = collective::Communicator::create(job.fabric, members, world);
  if (!communicator) return communicator.status();
  job.world = std::move(*communicator);
  return job;
}

}  // namespace muster::testing
