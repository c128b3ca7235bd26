/// A `collective::Communicator` whose calls are carried out by MPI.
///
/// A library of which muster has a `CallLibrary` and a `Comm` can carry them too (`carried_by`):
/// what is said of MPI here is said of that library then.
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

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/mpi/library.h"
#include "core/collective/communicator.h"
#include "core/collective/group_context.h"
#include "core/transport/fabric.h"
#include "muster/status.h"

namespace muster::mpi {

/// As `collective::Communicator::create`; `terms`, `use_region` and `tuning` of the options do not
/// matter. Code::unsupported if there is no MPI, or a member is not a process of this MPI job.
Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options);

/// The library that carries a group's calls.
struct Carriage {
  CallLibrary* library = nullptr;
  std::string name = "MPI";   ///< in errors
  std::int64_t last_tag = 0;  ///< 0: messages go over the group's channel
  /// Members compare every call before the library gets it, at any debug level.
  bool compares_calls = false;
  /// Called once a call may go on in the library that nobody can end.
  void (*on_abandoned)() = [] {};
};

/// The communicator of `group`, whose members `comm` has, in the same order.
std::shared_ptr<collective::Communicator> carried_by(Carriage carriage,
                                                     collective::GroupContext group,
                                                     std::unique_ptr<Comm> comm);

}  // namespace muster::mpi
