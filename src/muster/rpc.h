/// Calls between workers and what stands on them, in one include: torch.distributed.rpc's,
/// .autograd's, .optim's and .nn's names in namespace `muster::rpc`.
#pragma once

#include "muster/rpc/dist_autograd.h"
#include "muster/rpc/distributed_optimizer.h"
#include "muster/rpc/remote_module.h"
#include "muster/rpc/rpc.h"
#include "muster/rpc/rref.h"
