// SPDX-License-Identifier: BSD-3-Clause
/// A `collective::Communicator` whose calls MPI carries (`backends/carried/communicator.h`).
#pragma once

#include <memory>
#include <vector>

#include "core/collective/communicator.h"
#include "core/transport/fabric.h"
#include "muster/status.h"

namespace muster::mpi {

/// As `collective::Communicator::create`; `terms`, `use_region` and `tuning` of the options do not
/// matter. Code::unsupported if there is no MPI, or a member is not a process of this MPI job.
Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options);

}  // namespace muster::mpi
