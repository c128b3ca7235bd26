// SPDX-License-Identifier: BSD-3-Clause
/// The layers above the agent: remote references, distributed autograd, optimizers.
#pragma once

namespace muster::rpc {

class Agent;
/// Installs their handlers; call before the agent starts.
void install_extensions(Agent& agent);

}  // namespace muster::rpc
