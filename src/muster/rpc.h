/// Remote procedure calls and the layers above them in one include: the names of
/// torch.distributed.rpc, .autograd, .optim and .nn in namespace `muster::rpc`.
#pragma once

#include "muster/rpc/dist_autograd.h"
#include "muster/rpc/distributed_optimizer.h"
#include "muster/rpc/remote_module.h"
#include "muster/rpc/rpc.h"
#include "muster/rpc/rref.h"
