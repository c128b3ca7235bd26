// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/group/errors.h"
#include "muster/collectives.h"
#include "muster/device_mesh.h"
#include "train/mesh/chunk.h"
#include "train/mesh/sharded_norms.h"

namespace muster {
namespace {

using parallel::Chunk;
using parallel::chunk_of;
using parallel::NormPart;

/// The part of one rank of each group.
struct ShardBox {
  std::vector<std::int64_t> offsets, sizes;
};

/// `depth`: how many of the groups have divided.
ShardBox box_of(const std::vector<std::int64_t>& sizes, const std::vector<Group>& groups,
                const std::vector<Placement>& placements, std::size_t depth) {
  ShardBox box{std::vector<std::int64_t>(sizes.size(), 0), sizes};
  for (std::size_t i = 0; i < depth; ++i) {
    if (!placements[i].is_shard()) continue;
    const auto dim = static_cast<std::size_t>(placements[i].dim());
    const Chunk mine = chunk_of(box.sizes[dim], *groups[i]);
    box.offsets[dim] += mine.first;
    box.sizes[dim] = mine.count;
  }
  return box;
}

void check_placements(const std::vector<std::int64_t>& sizes, const std::vector<Group>& groups,
                      const std::vector<Placement>& placements) {
  if (groups.empty() || groups.size() != placements.size())
    group::invalid("ShardedTensor: " + std::to_string(placements.size()) + " placements for " +
                   std::to_string(groups.size()) + " groups: give one for each, and at least one");
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i] || !groups[i]->is_member())
      group::invalid("ShardedTensor: this rank is not a member of group " + std::to_string(i));
    const std::int64_t dim = placements[i].dim();
    if (placements[i].is_shard() && (dim < 0 || dim >= static_cast<std::int64_t>(sizes.size())))
      group::invalid("ShardedTensor: a tensor of " + std::to_string(sizes.size()) +
                     " dimensions is not divided along dimension " + std::to_string(dim));
  }
}

/// Concatenates the ranks' parts along `dim`, which has `size` elements in all of them together.
at::Tensor gathered(const at::Tensor& part, std::int64_t dim, std::int64_t size,
                    const Group& group) {
  const std::int64_t rows = chunk_of(size, group->size(), 0).count;
  auto sizes = part.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = rows;
  at::Tensor padded = at::zeros(sizes, part.options());
  padded.narrow(dim, 0, part.size(dim)).copy_(part);
  sizes.insert(sizes.begin(), group->size());
  const at::Tensor all = at::empty(sizes, part.options());
  all_gather_into_tensor(all, padded, {.group = group});
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group->size(); ++rank)
    parts.push_back(all.select(0, rank).narrow(dim, 0, chunk_of(size, group->size(), rank).count));
  return at::cat(parts, dim);
}

std::vector<NormPart> parts_of(const std::vector<ShardedTensor>& tensors, double norm_type) {
  if (!(norm_type > 0)) group::invalid("get_total_norm: norm_type must be more than 0");
  if (tensors.empty()) group::invalid("get_total_norm: there is no tensor, so no group either");
  std::vector<NormPart> parts;
  for (const ShardedTensor& tensor : tensors) {
    NormPart part;
    for (std::size_t i = 0; i < tensor.groups().size(); ++i) {
      if (tensor.placements()[i].is_partial())
        group::invalid(
            "get_total_norm: a tensor is partial(), a sum that has not been formed: all_reduce it");
      (tensor.placements()[i].is_shard() ? part.shards : part.replicas)
          .push_back(tensor.groups()[i]);
    }
    auto found = std::ranges::find_if(parts, [&](const NormPart& each) {
      return each.shards == part.shards && each.replicas == part.replicas;
    });
    if (found == parts.end()) found = parts.insert(parts.end(), std::move(part));
    if (tensor.local().defined()) found->tensors.push_back(tensor.local());
  }
  return parts;
}

double norm_of(const std::vector<NormPart>& parts, const ShardedTensor& first, double norm_type) {
  return parallel::norm_of_parts("get_total_norm: the tensors", parts, {}, norm_type,
                                 first.local().device());
}

}  // namespace

ShardedTensor::ShardedTensor(at::Tensor local, std::vector<std::int64_t> sizes,
                             std::vector<Group> groups, std::vector<Placement> placements)
    : local_(std::move(local)),
      sizes_(std::move(sizes)),
      groups_(std::move(groups)),
      placements_(std::move(placements)) {
  check_placements(sizes_, groups_, placements_);
  ShardBox box = box_of(sizes_, groups_, placements_, groups_.size());
  if (!local_.defined() || local_.sizes() != box.sizes)
    group::invalid("ShardedTensor: this rank's part of a tensor of " +
                   c10::str(at::IntArrayRef(sizes_)) + " is " +
                   c10::str(at::IntArrayRef(box.sizes)) + ", and a tensor of " +
                   (local_.defined() ? c10::str(local_.sizes()) : std::string("nothing")) +
                   " was given for it");
  offsets_ = std::move(box.offsets);
}

ShardedTensor ShardedTensor::distribute(const at::Tensor& whole, const std::vector<Group>& groups,
                                        const std::vector<Placement>& placements) {
  const std::vector<std::int64_t> sizes = whole.sizes().vec();
  check_placements(sizes, groups, placements);
  for (const Placement& each : placements)
    if (each.is_partial())
      group::invalid("ShardedTensor: a whole tensor is not distributed as partial()");
  const ShardBox box = box_of(sizes, groups, placements, groups.size());
  at::Tensor local = whole.detach();
  for (std::size_t dim = 0; dim < sizes.size(); ++dim)
    local = local.narrow(static_cast<std::int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  return {local.clone(at::MemoryFormat::Contiguous), sizes, groups, placements};
}

at::Tensor ShardedTensor::full() const {
  const at::NoGradGuard no_grad;
  at::Tensor whole = local_.detach();
  // The last group divided the parts of those before it.
  for (std::size_t i = groups_.size(); i-- > 0;) {
    if (placements_[i].is_partial()) {
      whole = whole.clone(at::MemoryFormat::Contiguous);
      all_reduce(whole, {.group = groups_[i]});
    } else if (placements_[i].is_shard()) {
      const auto dim = static_cast<std::size_t>(placements_[i].dim());
      const std::int64_t size = box_of(sizes_, groups_, placements_, i).sizes[dim];
      whole = gathered(whole, placements_[i].dim(), size, groups_[i]);
    }
  }
  return whole.is_alias_of(local_) ? whole.clone(at::MemoryFormat::Contiguous) : whole;
}

double get_total_norm(const std::vector<ShardedTensor>& tensors, double norm_type) {
  const at::NoGradGuard no_grad;
  return norm_of(parts_of(tensors, norm_type), tensors.front(), norm_type);
}

double clip_grad_norm_(const std::vector<ShardedTensor>& gradients, double max_norm,
                       double norm_type) {
  const at::NoGradGuard no_grad;
  const std::vector<NormPart> parts = parts_of(gradients, norm_type);
  const double norm = norm_of(parts, gradients.front(), norm_type);
  parallel::scale_to_norm(parts, {}, norm, max_norm);
  return norm;
}

}  // namespace muster
