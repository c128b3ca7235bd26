// SPDX-License-Identifier: BSD-3-Clause
/// The numbers of nodes and the program are the job's, so the node that came first says which they
/// are. A node that was started with others refuses itself.
#pragma once

#include <optional>
#include <string>

#include "jobs/launch/node/node_details.h"
#include "jobs/membership/job_view.h"
#include "jobs/membership/next_epoch.h"

namespace muster::launch {

struct OwnJob {
  const membership::EpochOptions& epochs;
  const std::string& name;  ///< of the job, for messages
  const NodeDetails& node;
};

/// Why the node that holds the name `own`, which has no seat, is not of the job of the nodes that
/// came before it; nothing if it is.
std::optional<std::string> why_another_job(const membership::JobView& view, const std::string& own,
                                           const OwnJob& job);

}  // namespace muster::launch
