// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/extensions.h"

#include "muster/distributed_optimizer.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/rref/rref_context.h"

namespace muster::rpc {

void install_extensions(Agent& agent) {
  const auto shared = agent.shared_from_this();
  RRefContext::install(shared);
  DistAutograd::install(shared);
  detail::register_optimizer_functions();
}

}  // namespace muster::rpc
