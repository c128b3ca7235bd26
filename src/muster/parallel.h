/// Training one model on several ranks, in one include: DistributedDataParallel and its
/// communication hooks, Join for uneven inputs, an optimizer whose state is divided among the
/// ranks, averaging of models, collectives that gradients flow through; and DataParallel for the
/// devices of one process.
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
