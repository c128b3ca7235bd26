/// A `collective::Communicator` whose calls are carried out by MPI.
///
/// Collectives are non-blocking operations of MPI on a communicator of the group alone; they are
/// begun, and end, in the order of the calls. Whoever waits polls MPI; calls that nobody waits for
/// are polled by one thread of the process (`poller.h`). The group also has a channel of muster's
/// fabric, on which members learn of failures, tell each other which call they wait in, and compare
/// their calls at the end; at debug level DETAIL they compare every call there before MPI gets it.
///
/// MPI cannot cancel an operation. A call that passes its deadline therefore fails the group for
/// good, and memory that MPI may still write to is kept for ever.
#pragma once

#include <functional>
#include <memory>

#include "muster/collective/communicator.h"
#include "muster/status.h"
#include "muster/transport/fabric.h"

namespace muster::mpi {

/// As `collective::Communicator::create`; `terms`, `use_region` and `tuning` of the options do not
/// matter. Code::unsupported if there is no MPI, or a member is not a process of this MPI job.
Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options);

}  // namespace muster::mpi
