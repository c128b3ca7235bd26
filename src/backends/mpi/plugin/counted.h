// SPDX-License-Identifier: BSD-3-Clause
/// MPI's operations with 64-bit counts: MPI 4's own where mpi.h has them, otherwise those with
/// int counts, which refuse what does not fit (`kCountTooLarge`).
#pragma once

#include <mpi.h>

#include <vector>

#include "backends/mpi/library.h"

namespace muster::mpi::counted {

/// Elements of each member, and where they begin.
struct CountedParts {
  const Count* counts;
  const Count* places;
  int size;
};

}  // namespace muster::mpi::counted

#if MPI_VERSION >= 4
#include "backends/mpi/plugin/counted_mpi4.h"
#else
#include "backends/mpi/plugin/counted_mpi3.h"
#endif
