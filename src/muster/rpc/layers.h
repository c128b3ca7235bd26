/// What stands on the agent: remote references, distributed autograd, optimizers.
#pragma once

namespace muster::rpc {

class Agent;
/// Gives the agent their handlers; before it starts.
void install_layers(Agent& agent);

}  // namespace muster::rpc
