// SPDX-License-Identifier: BSD-3-Clause
/// The norm of tensors that are divided among ranks in different ways.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "muster/process_group.h"

namespace muster::parallel {

/// Tensors that are divided among the ranks of the same groups. All ranks of `shards` together, one
/// of each group's members combined with each of the others', hold them once; those of `replicas`
/// hold the same.
struct NormPart {
  std::vector<Group> shards, replicas;
  std::vector<at::Tensor> tensors;  ///< of this rank
};

/// Collective. The norm of the parts, each element of which counts once, and of `others`, which
/// every rank holds whole; if those differ between ranks, their mean counts. All ranks get the same
/// number, bit for bit. The parts are in one order on all ranks, and not none. `norm_type` is
/// infinity or more than 0. Throws DistError, which begins with `who`, on every rank if the parts
/// do not all lie on the same ranks.
double norm_of_parts(const std::string& who, const std::vector<NormPart>& parts,
                     const std::vector<at::Tensor>& others, double norm_type, at::Device device);

/// Scales the tensors so that their norm, `norm` now, is at most `max_norm`.
void scale_to_norm(const std::vector<NormPart>& parts, const std::vector<at::Tensor>& others,
                   double norm, double max_norm);

}  // namespace muster::parallel
