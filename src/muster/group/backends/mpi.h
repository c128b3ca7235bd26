/// Backends mpi and ucc: communicators of backends/mpi and backends/ucc, used as muster's own are.
#pragma once

#include "muster/group/backend_registry.h"

namespace muster::group {

OwnBackend mpi_backend();
OwnBackend ucc_backend();

}  // namespace muster::group
