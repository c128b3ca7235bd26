/// What a scheduler that starts `muster run` once on every node says of the nodes: Slurm's srun, an
/// Indexed Job or JobSet of Kubernetes.
#pragma once

#include "core/rendezvous/scheduler.h"
#include "jobs/launch/options.h"

namespace muster::launch {

/// Fills what the options leave open: number of nodes, this node's number, address and port of node
/// 0. `nodes_given`: --nnodes was given, and counts. Code::invalid_argument if srun starts several
/// tasks on a node, or --nnodes is not the number of srun's nodes.
Status take_scheduled_node(RunOptions& options, bool nodes_given,
                           const VariableOf& variable = env_text);

}  // namespace muster::launch
