// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/job_identity.h"

namespace muster::launch {
namespace {

std::string numbers(int least, int most) {
  return "--nnodes " + (least == most ? "" : std::to_string(least) + ":") + std::to_string(most);
}

}  // namespace

std::optional<std::string> why_another_job(const membership::JobView& view, const std::string& own,
                                           const OwnJob& job) {
  const auto& [epochs, job_name, mine] = job;
  for (const auto& [name, node] : view.nodes()) {
    const membership::NodeReport& theirs = node.report;
    const bool same = theirs.most_nodes == 0 || (theirs.least_nodes == epochs.min_nodes &&
                                                 theirs.most_nodes == epochs.max_nodes);
    if (same && membership::is_same_program(theirs, epochs)) continue;
    if (node.slot < 0 && node.since > view.nodes().at(own).since) continue;
    const auto details = decode_node_details(theirs.details);
    const std::string them = details ? details->launcher : name;
    if (!same)
      return "this node was started with " + numbers(epochs.min_nodes, epochs.max_nodes) +
             ", and " + them + " of the same job with " +
             numbers(theirs.least_nodes, theirs.most_nodes) +
             "; give all nodes of a job the same --nnodes, and every job an --rdzv-id of its own";
    return "this node was started with " + mine.program + ", and " + them + " of the same job \"" +
           job_name + "\" with " +
           (!details                           ? "another program"
            : details->program == mine.program ? "other arguments of it"
                                               : details->program) +
           "; give all nodes of a job the same program and arguments, and every job an --rdzv-id "
           "of its own";
  }
  return std::nullopt;
}

}  // namespace muster::launch
