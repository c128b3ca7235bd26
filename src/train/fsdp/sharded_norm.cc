// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_norm.h"

#include <torch/types.h>

#include <algorithm>

#include "core/group/errors.h"
#include "train/fsdp/sharded_unit.h"
#include "train/mesh/sharded_norms.h"

namespace muster::parallel {
namespace {

/// In the units' order, which is the same on all ranks.
std::vector<NormPart> parts_of(const std::vector<ShardedUnit*>& units) {
  std::vector<NormPart> parts;
  for (ShardedUnit* unit : units) {
    const std::vector<Group> shards{unit->group()};
    std::vector<Group> replicas;
    if (unit->replicas()) replicas.push_back(unit->replicas());
    auto found = std::ranges::find_if(parts, [&](const NormPart& part) {
      return part.shards == shards && part.replicas == replicas;
    });
    if (found == parts.end()) found = parts.insert(parts.end(), {shards, replicas, {}});
    for (std::size_t i = 0; i < unit->parameters().size(); ++i)
      if (const at::Tensor& gradient = unit->parameters()[i].grad(); gradient.defined())
        found->tensors.push_back(gradient);
  }
  return parts;
}

}  // namespace

double clip_grad_norm(const std::vector<ShardedUnit*>& units, const std::vector<at::Tensor>& others,
                      double max_norm, double norm_type) {
  if (units.empty())
    group::invalid("FullyShardedDataParallel: clip_grad_norm_ of a model that is not sharded");
  if (!(norm_type > 0)) group::invalid("FullyShardedDataParallel: norm_type must be more than 0");
  const at::NoGradGuard no_grad;
  at::Device device = at::kCPU;  // ranks' devices may differ only in their index
  for (ShardedUnit* unit : units)
    if (unit->parameters().size() > 0) device = unit->parameters()[0].device();
  const std::vector<NormPart> parts = parts_of(units);
  const double norm =
      norm_of_parts("FullyShardedDataParallel: clip_grad_norm_ of a model whose units", parts,
                    others, norm_type, device);
  scale_to_norm(parts, others, norm, max_norm);
  return norm;
}

}  // namespace muster::parallel
