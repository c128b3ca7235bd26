/// Calls between workers, in one include: torch.distributed.rpc's names in namespace `muster::rpc`.
#pragma once

#include "muster/rpc/rpc.h"
