// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/rank_assignment.h"

#include "core/base/bytes.h"

namespace muster::launch {

std::vector<WorkerRanks> assign_ranks(const std::vector<NodeFacts>& nodes, int node) {
  const NodeFacts& here = nodes[static_cast<std::size_t>(node)];
  WorkerRanks base;
  base.world_size = 0;
  base.role_world_size = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const bool before = static_cast<int>(i) < node;
    const bool same_role = nodes[i].role == here.role;
    base.world_size += nodes[i].workers;
    if (before) base.rank += nodes[i].workers;
    if (same_role) base.role_world_size += nodes[i].workers;
    if (same_role && before) base.role_rank += nodes[i].workers;
  }
  base.local_world_size = here.workers;
  base.group_rank = node;
  base.group_world_size = static_cast<int>(nodes.size());
  std::vector<WorkerRanks> workers(static_cast<std::size_t>(here.workers), base);
  for (int local = 0; local < here.workers; ++local) {
    WorkerRanks& worker = workers[static_cast<std::size_t>(local)];
    worker.local_rank = local;
    worker.rank += local;
    worker.role_rank += local;
  }
  return workers;
}

int node_of_rank(const std::vector<NodeFacts>& nodes, int rank) {
  for (std::size_t node = 0; node < nodes.size() && rank >= 0; ++node) {
    if (rank < nodes[node].workers) return static_cast<int>(node);
    rank -= nodes[node].workers;
  }
  return -1;
}

std::string encode(const NodeFacts& facts) {
  ByteWriter writer;
  writer.put(std::int32_t{facts.workers})
      .put(std::int32_t{facts.max_restarts})
      .put_text(facts.role)
      .put_text(facts.host);
  return writer.take();
}

Result<NodeFacts> decode_node_facts(const std::string& record) {
  ByteReader reader(record);
  NodeFacts facts;
  facts.workers = reader.get<std::int32_t>();
  facts.max_restarts = reader.get<std::int32_t>();
  facts.role = reader.get_text();
  facts.host = reader.get_text();
  if (!reader.at_end() || facts.workers < 1 || facts.workers > (1 << 16)) {
    return Status(Code::mismatch,
                  "a node described itself in a form that this version does not know; run the same "
                  "muster on all nodes");
  }
  return facts;
}

}  // namespace muster::launch
