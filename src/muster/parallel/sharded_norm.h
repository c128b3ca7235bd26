/// The norm of gradients of which every rank has its shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace muster::parallel {

class ShardedUnit;

/// Collective: the norm of all gradients of these units together, over all ranks; gradients are
/// multiplied so that it is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does. `others`:
/// gradients of tensors that every rank has whole; where they differ the ranks' mean counts.
/// `norm_type`: infinity or positive. All units are of one group.
double clip_grad_norm(const std::vector<ShardedUnit*>& units, const std::vector<at::Tensor>& others,
                      double max_norm, double norm_type);

}  // namespace muster::parallel
