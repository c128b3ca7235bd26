#include "jobs/launch/node/scheduled_node.h"

#include "core/net/host_name.h"

namespace muster::launch {

Status take_scheduled_node(RunOptions& options, bool nodes_given, const VariableOf& variable) {
  const auto scheduled = detect_node(variable);
  if (!scheduled || options.standalone || options.node_rank || options.endpoint ||
      options.rendezvous != RendezvousKind::static_ranks)
    return {};
  const int nodes = scheduled->nodes.value_or(options.nodes);
  if (nodes == 1 || (nodes_given && options.nodes == 1)) return {};
  if (scheduled->tasks_on_node > 1) {
    return Status(Code::invalid_argument,
                  options.command + " was started " + std::to_string(scheduled->tasks_on_node) +
                      " times on this node by " + scheduled->name +
                      "; it starts the workers itself: srun --ntasks-per-node=1 " +
                      options.command + " --nproc-per-node N ...");
  }
  if (nodes_given && options.nodes != nodes) {
    return Status(Code::invalid_argument, "--nnodes " + std::to_string(options.nodes) + ": " +
                                              scheduled->name + " has started this on " +
                                              std::to_string(nodes) +
                                              " nodes; leave --nnodes out to take that");
  }
  options.nodes = options.min_nodes = nodes;
  options.node_rank = scheduled->node_rank;
  if (!options.master_addr && !scheduled->master.empty())
    options.master_addr =
        scheduled->master_shares_domain ? in_own_domain(scheduled->master) : scheduled->master;
  if (!options.master_port) options.master_port = scheduled->port;
  return {};
}

}  // namespace muster::launch
