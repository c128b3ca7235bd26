// SPDX-License-Identifier: BSD-3-Clause
/// The job that MPI itself knows: `mpirun ./program` needs no address, no store and no variables.
#pragma once

#include "core/rendezvous/rendezvous.h"

namespace muster::mpi {

/// Rank and world size are those of MPI_COMM_WORLD, all of whose processes call this. The first
/// serves a store, and MPI carries its address to the others; if they are on several hosts and no
/// secret is given, MPI carries a fresh one too, in MUSTER_SECRET of each process. `init_method`,
/// `rank` and `world_size` of the options do not matter. Blocks.
Result<store::Rendezvous> rendezvous_of_world(store::RendezvousOptions options);

}  // namespace muster::mpi
