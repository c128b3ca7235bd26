// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_norm.h"

#include <torch/types.h>

#include <algorithm>
#include <string>

#include "core/group/errors.h"
#include "muster/device_mesh.h"
#include "train/fsdp/sharded_unit.h"
#include "train/mesh/sharded_norms.h"

namespace muster::parallel {
namespace {

/// The group that divides some of the units' parameters by tensor parallelism; null: none does.
Group tensor_parallel_group(const std::vector<ShardedUnit*>& units) {
  Group found;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const auto part = tensor_parallel_part(unit->parameters()[i]);
      if (!part) continue;
      const std::string who = "FullyShardedDataParallel: clip_grad_norm_ of '" +
                              unit->parameters().name(i) + "', a part of tensor parallelism ";
      if (!part->group)
        group::invalid(who +
                       "whose group is not known, and so neither are the parts that belong "
                       "into the norm: give set_tensor_parallel_part() the group");
      if (found && part->group != found)
        group::invalid(who +
                       "over another group than other parameters': clip those of each "
                       "group by themselves");
      found = part->group;
    }
  return found;
}

/// In the units' order, which is the same on all ranks. With tensor parallelism its ranks hold
/// either parts of a parameter or all the same.
std::vector<NormPart> parts_of(const std::vector<ShardedUnit*>& units) {
  const Group layers = tensor_parallel_group(units);
  std::vector<NormPart> parts;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const at::Tensor& parameter = unit->parameters()[i];
      std::vector<Group> shards{unit->group()}, replicas;
      if (unit->replicas()) replicas.push_back(unit->replicas());
      if (layers) (tensor_parallel_part(parameter) ? shards : replicas).push_back(layers);
      auto found = std::ranges::find_if(parts, [&](const NormPart& part) {
        return part.shards == shards && part.replicas == replicas;
      });
      if (found == parts.end()) found = parts.insert(parts.end(), {shards, replicas, {}});
      if (parameter.grad().defined()) found->tensors.push_back(parameter.grad());
    }
  if (parts.empty()) parts.push_back({{units.front()->group()}, {}, {}});
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
