/// Data-parallel training in one include: DistributedDataParallel and its communication hooks,
/// FullyShardedDataParallel, Join for uneven inputs, ZeroRedundancyOptimizer, model averaging and
/// differentiable collectives; and DataParallel for the devices of one process.
#pragma once

#include "muster/parallel/comm_hook.h"
#include "muster/parallel/data_parallel.h"
#include "muster/parallel/distributed_data_parallel.h"
#include "muster/parallel/fully_sharded_data_parallel.h"
#include "muster/parallel/functional.h"
#include "muster/parallel/join.h"
#include "muster/parallel/model_averaging.h"
#include "muster/parallel/post_local_sgd_hook.h"
#include "muster/parallel/power_sgd_hook.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
