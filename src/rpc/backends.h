// SPDX-License-Identifier: BSD-3-Clause
/// Kinds of agents, and what is installed in each agent before it starts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/rpc_calls.h"
#include "rpc/agent/agent.h"

namespace muster::rpc {

/// Arguments for constructing an agent.
struct BackendRequest {
  std::string name;
  int rank = -1;
  int world_size = -1;
  RpcBackendOptions options;
  std::shared_ptr<store::Store> store;  ///< null: use options.init_method
  Duration join_timeout = std::chrono::minutes(30);
};
/// Makes an agent that is connected to the other workers but not started.
using InitBackend = std::function<std::shared_ptr<Agent>(const BackendRequest&)>;
/// Throws if the name is taken.
BackendType register_backend(const std::string& name, InitBackend init);
bool backend_registered(const std::string& name);

/// Joins over an existing fabric (tests, simulations). `names[rank]` is the name of each worker.
void init_rpc_on(std::unique_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
                 const RpcBackendOptions& options = {});

/// Functions that the layers above (references, autograd) run on every agent before it starts, to
/// install handlers, an observer and drains. Add to it before the first init_rpc.
std::vector<std::function<void(Agent&)>>& extensions();

}  // namespace muster::rpc
