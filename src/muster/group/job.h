/// What all groups of one job share in this process: store, fabric, and how groups are made on them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/backend_name.h"
#include "muster/group/process_group.h"
#include "muster/store/rendezvous.h"
#include "muster/store/store.h"
#include "muster/transport/fabric.h"

namespace muster::group {

struct Job {
  int rank = 0;
  int world_size = 1;
  std::string name;  ///< the same on all ranks
  std::shared_ptr<store::Store> store;
  std::shared_ptr<transport::Fabric> fabric;
};

/// Meets the other ranks over the store. Throws naming the ranks that did not come, or whose backend or interfaces differ.
std::shared_ptr<Job> open_job(store::Rendezvous found, const BackendConfig& config, Duration timeout);

/// Every member calls it; `ranks` in group order. Blocks until all members have. A process that is not in `ranks` gets a non-member's group
/// at once.
Group make_group(const std::shared_ptr<Job>& job, std::string name, std::vector<int> ranks, BackendConfig config, Duration timeout);

}  // namespace muster::group
