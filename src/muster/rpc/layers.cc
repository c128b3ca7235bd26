#include "muster/rpc/layers.h"

#include "muster/distributed_optimizer.h"
#include "muster/rpc/autograd_context.h"
#include "muster/rpc/rref_context.h"

namespace muster::rpc {

void install_layers(Agent& agent) {
  const auto shared = agent.shared_from_this();
  RRefContext::install(shared);
  DistAutograd::install(shared);
  detail::register_optimizer_functions();
}

}  // namespace muster::rpc
