// SPDX-License-Identifier: BSD-3-Clause
/// backends/ucc/: groups whose collectives UCC carries out. Experimental.
///
/// Folder: `api.h`, UCC's interface in declarations of our own; `library.h`, its library, found
/// when it is first needed; `team.h`, a group's collectives; `team.h`, how a team is made.
/// The communicator is backend mpi's (`carried::communicator_over`), with its order of calls,
/// deadlines and conversions of dtypes. UCC has no messages: those go over muster's own links. Free
/// of torch. May include backends/mpi and the layers below it. Tests: `ctest -R '^ucc'`.
#pragma once

#include <memory>
#include <vector>

#include "core/collective/communicator.h"
#include "core/transport/fabric.h"
#include "muster/status.h"

namespace muster::ucc {

/// As `carried::create`. Code::unsupported if there is no UCC.
Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options);

}  // namespace muster::ucc
