/// Backend mpi: communicators of backends/mpi, used as muster's own are.
#pragma once

#include "muster/group/backend_registry.h"

namespace muster::group {

OwnBackend mpi_backend();

}  // namespace muster::group
