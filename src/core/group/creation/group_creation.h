// SPDX-License-Identifier: BSD-3-Clause
/// Creates a group and adds it to the world; finds out if it can never come about.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/group/job.h"
#include "core/group/world.h"

namespace muster::group {

/// Throws DistBackendError naming a backend that cannot be used here, and those that can.
void check_available(const BackendConfig& config);

struct NewGroupRequest {
  std::string call;        ///< for words; equal on all members
  std::vector<int> ranks;  ///< in group order
  BackendConfig config;
  Duration timeout{};         ///< of the group's calls
  bool members_only = false;  ///< the other ranks of the job do not call
};

/// Blocks until all members have called. Members that wait for each other in several creations get
/// an error. `creation`: with deadline and options, and what the members have agreed on.
Group create_group(World& scope, const std::shared_ptr<Job>& job, NewGroupRequest request,
                   CreationOptions creation);

}  // namespace muster::group
