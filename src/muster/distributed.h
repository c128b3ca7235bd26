/// The C++ interface of muster in one include: torch.distributed's names in namespace `muster`.
///
/// Stores, init_process_group, groups, point-to-point calls, collectives, spawn and the sampler. It
/// includes only torch's tensor class; include whatever else of torch the program uses. Python's
/// keyword arguments are fields of an options struct: `all_reduce(tensor, {.op = ReduceOp::MAX,
/// .async_op = true})`.
#pragma once

#include "muster/group/backend_name.h"
#include "muster/group/backend_registry.h"
#include "muster/group/collectives.h"
#include "muster/group/debug.h"
#include "muster/group/distributed_sampler.h"
#include "muster/group/errors.h"
#include "muster/group/init.h"
#include "muster/group/objects.h"
#include "muster/group/point_to_point.h"
#include "muster/group/reduce_op.h"
#include "muster/group/shared_allocator.h"
#include "muster/group/shared_tensor.h"
#include "muster/group/spawn.h"
#include "muster/group/store.h"
#include "muster/group/subgroups.h"
#include "muster/group/work.h"
#include "muster/group/world.h"
