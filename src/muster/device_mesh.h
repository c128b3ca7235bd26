/// Grids of ranks: torch.distributed.device_mesh in namespace `muster`. See muster/distributed.h
/// for everything else.
#pragma once

#include "muster/mesh/device_mesh.h"
