/// Training one model on several ranks, in one include: DistributedDataParallel and its communication hooks, Join for uneven inputs.
#pragma once

#include "muster/parallel/comm_hook.h"
#include "muster/parallel/distributed_data_parallel.h"
#include "muster/parallel/join.h"
