// SPDX-License-Identifier: BSD-3-Clause
/// A `collective::Communicator` whose calls another library carries out: MPI or UCC.
///
/// Collectives are non-blocking operations on a communicator of the library for the group alone;
/// they are begun, and end, in the order of the calls. A thread that waits polls the library; one
/// thread of the process polls calls that no thread waits for (`poller.h`). The group also has a
/// channel of muster's fabric, on which members learn of failures, tell each other which call they
/// wait in, and compare their calls at the end; at debug level DETAIL they compare every call there
/// before the library gets it.
///
/// The library cannot cancel an operation. A call that passes its deadline therefore fails the
/// group for good, and memory that the library may still write to is kept for ever.
///
/// Comments of this folder say MPI for the library, whichever it is.
///
/// Folder: `library.h`, what a library provides; `call.h`, one collective; `direct_all_reduce.h`,
/// one that is made of messages; `messages.h`; `fingerprint_exchange.h`, which call it is. Free of
/// torch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/carried/library.h"
#include "core/collective/communicator.h"
#include "core/collective/group_context.h"
#include "core/transport/fabric.h"
#include "muster/status.h"

namespace muster::carried {

/// The library that carries a group's calls.
struct CarryingLibrary {
  CallLibrary* library = nullptr;
  std::string name = "MPI";   ///< in errors
  std::int64_t last_tag = 0;  ///< 0: messages go over the group's channel
  /// Members compare every call before the library gets it, at any debug level.
  bool compares_calls = false;
  /// Called once a call may go on in the library that nobody can end.
  void (*on_abandoned)() = [] {};
};

/// The communicator of `group`, whose members `comm` has, in the same order.
std::shared_ptr<collective::Communicator> communicator_over(CarryingLibrary carrying,
                                                            collective::GroupContext group,
                                                            std::unique_ptr<Comm> comm);

}  // namespace muster::carried
