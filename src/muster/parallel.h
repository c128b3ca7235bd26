/// Training one model on several ranks, in one include: DistributedDataParallel and its communication hooks, Join for uneven inputs, and
/// an optimizer whose state is divided among the ranks.
#pragma once

#include "muster/parallel/comm_hook.h"
#include "muster/parallel/distributed_data_parallel.h"
#include "muster/parallel/join.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
