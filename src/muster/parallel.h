/// Training one model on several ranks, in one include: DistributedDataParallel and its communication hooks.
#pragma once

#include "muster/parallel/comm_hook.h"
#include "muster/parallel/distributed_data_parallel.h"
