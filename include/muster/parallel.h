// SPDX-License-Identifier: BSD-3-Clause
/// Data-parallel training in one include: DistributedDataParallel and its communication hooks,
/// FullyShardedDataParallel, Join for uneven inputs, ZeroRedundancyOptimizer, LocalSgd and DiLoCo
/// for slow links, model averaging and differentiable collectives; and DataParallel for the devices
/// of one process.
#pragma once

#include "muster/comm_hook.h"
#include "muster/data_parallel.h"
#include "muster/distributed_data_parallel.h"
#include "muster/fully_sharded_data_parallel.h"
#include "muster/functional.h"
#include "muster/join.h"
#include "muster/local_sgd.h"
#include "muster/model_averaging.h"
#include "muster/zero_redundancy_optimizer.h"
