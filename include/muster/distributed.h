// SPDX-License-Identifier: BSD-3-Clause
/// The C++ interface of muster in one include: torch.distributed's names in namespace `muster`.
///
/// Stores, init_process_group, groups, point-to-point calls, collectives, spawn and the sampler. It
/// includes only torch's tensor class; include whatever else of torch the program uses. Python's
/// keyword arguments are fields of an options struct: `all_reduce(tensor, {.op = ReduceOp::MAX,
/// .async_op = true})`.
#pragma once

#include "muster/backend.h"
#include "muster/backend_name.h"
#include "muster/collectives.h"
#include "muster/debug.h"
#include "muster/distributed_sampler.h"
#include "muster/errors.h"
#include "muster/init.h"
#include "muster/objects.h"
#include "muster/op.h"
#include "muster/point_to_point.h"
#include "muster/shared_memory.h"
#include "muster/spawn.h"
#include "muster/store.h"
#include "muster/subgroups.h"
#include "muster/work.h"
