// SPDX-License-Identifier: BSD-3-Clause
/// Remote procedure calls and the layers above them in one include: the names of
/// torch.distributed.rpc, .autograd, .optim and .nn in namespace `muster::rpc`.
#pragma once

#include "muster/dist_autograd.h"
#include "muster/distributed_optimizer.h"
#include "muster/remote_module.h"
#include "muster/rpc_calls.h"
#include "muster/rref.h"
