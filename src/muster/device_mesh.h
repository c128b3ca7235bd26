/// Ranks laid out on a grid: torch.distributed.device_mesh in namespace `muster`. See
/// muster/distributed.h for all else.
#pragma once

#include "muster/mesh/device_mesh.h"
