// SPDX-License-Identifier: BSD-3-Clause
/// The norm of sharded gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "muster/process_group.h"

namespace muster::parallel {

class ShardedUnit;

/// Collective. Computes the norm of all gradients of these units over all ranks and scales the
/// gradients so that it is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does. `others` are
/// gradients of tensors that every rank holds whole; if they differ between ranks, their mean
/// counts. `norm_type` is infinity or positive. Units may be divided and replicated in different
/// ways (full, hybrid, NO_SHARD); each parameter counts once. Throws DistError on every rank if the
/// units do not all lie on the same ranks, or if parts of tensor parallelism are among a unit's own
/// ranks.
double clip_grad_norm(const std::vector<ShardedUnit*>& units, const std::vector<at::Tensor>& others,
                      double max_norm, double norm_type);

/// Whether ranks beside this one are in both groups. False if one is null.
bool share_ranks(const Group& one, const Group& other);
/// For a part of tensor parallelism whose group shares ranks with those of its unit.
[[noreturn]] void refuse_parts_as_copies(const std::string& name);

}  // namespace muster::parallel
