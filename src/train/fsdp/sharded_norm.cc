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

[[noreturn]] void refuse_part(const std::string& name, const std::string& why) {
  group::invalid("FullyShardedDataParallel: '" + name + "' is a part of tensor parallelism " + why);
}

bool is_frozen(const at::Tensor& parameter) {
  return !parameter.requires_grad() && !parameter.grad().defined();
}

/// The group that divides some of the units' parameters by tensor parallelism; null: none does.
Group group_of_parts(const std::vector<ShardedUnit*>& units) {
  Group known;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const at::Tensor& parameter = unit->parameters()[i];
      const auto part = tensor_parallel_part(parameter);
      if (!part || (!part->group && is_frozen(parameter))) continue;
      const std::string& name = unit->parameters().name(i);
      if (!part->group)
        refuse_part(name,
                    "whose group is not known, and so neither are the parts that belong into the "
                    "norm: give set_tensor_parallel_part() the group");
      if (known && part->group->ranks() != known->ranks())
        refuse_part(name,
                    "over another group than other parameters': clip those of each group by "
                    "themselves");
      if (share_ranks(part->group, unit->group()) || share_ranks(part->group, unit->replicas()))
        refuse_parts_as_copies(name);
      if (!known) known = part->group;
    }
  return known;
}

/// In the units' order, which is the same on all ranks. With tensor parallelism its ranks hold
/// either parts of a parameter or all the same.
std::vector<NormPart> parts_of(const std::vector<ShardedUnit*>& units) {
  const Group of_parts = group_of_parts(units);
  std::vector<NormPart> parts;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const at::Tensor& parameter = unit->parameters()[i];
      std::vector<Group> shards{unit->group()}, replicas;
      if (unit->replicas()) replicas.push_back(unit->replicas());
      if (of_parts) (tensor_parallel_part(parameter) ? shards : replicas).push_back(of_parts);
      auto same = std::ranges::find_if(parts, [&](const NormPart& part) {
        return part.shards == shards && part.replicas == replicas;
      });
      if (same == parts.end()) same = parts.insert(parts.end(), {shards, replicas, {}});
      if (parameter.grad().defined()) same->tensors.push_back(parameter.grad());
    }
  if (parts.empty()) parts.push_back({{units.front()->group()}, {}, {}});
  return parts;
}

}  // namespace

void refuse_parts_as_copies(const std::string& name) {
  refuse_part(name,
              "whose other parts are on ranks of its unit's own groups, which take the parts for "
              "copies of one tensor: give FullyShardedDataParallel another dimension of the mesh");
}

bool share_ranks(const Group& one, const Group& other) {
  return one && other && std::ranges::count_if(one->ranks(), [&](int rank) {
                           return std::ranges::count(other->ranks(), rank) > 0;
                         }) > 1;
}

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
