// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <utility>

#include "core/group/errors.h"
#include "muster/collectives.h"
#include "muster/functional.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {
namespace {

using at::Tensor;
using tensor_parallel::chunk_of;
using torch::autograd::variable_list;

enum class RegionKind { copy, reduce, scatter, gather };

/// An edge of a region, as a function of tensors. muster/functional.h has the collectives' own
/// gradients; here a rank's loss is the whole loss, not a part of a sum.
struct RegionEdge : torch::CustomClassHolder {
  RegionEdge(RegionKind kind, Group group, std::int64_t dim = 0, std::int64_t size = 0)
      : kind(kind), group(std::move(group)), dim(dim), size(size) {}

  RegionKind kind;
  Group group;
  std::int64_t dim, size;  // what scatter and gather divide: a dimension, and its whole size

  Tensor run(const Tensor& tensor) const;
  c10::intrusive_ptr<RegionEdge> adjoint() const {
    constexpr RegionKind kAdjoints[] = {RegionKind::reduce, RegionKind::copy, RegionKind::gather,
                                        RegionKind::scatter};
    return c10::make_intrusive<RegionEdge>(kAdjoints[static_cast<std::size_t>(kind)], group, dim,
                                           size);
  }

 private:
  Tensor gathered(const Tensor& tensor) const;
};

Tensor RegionEdge::run(const Tensor& tensor) const {
  switch (kind) {
    case RegionKind::copy: return tensor;
    case RegionKind::reduce: {
      Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
      all_reduce(sum, {.group = group});
      return sum;
    }
    case RegionKind::scatter: {
      const auto mine = chunk_of(size, *group);
      return tensor.narrow(dim, mine.first, mine.count).clone(at::MemoryFormat::Contiguous);
    }
    case RegionKind::gather: return gathered(tensor);
  }
  return tensor;
}

Tensor RegionEdge::gathered(const Tensor& tensor) const {
  TensorList parts;
  auto sizes = tensor.sizes().vec();
  for (int rank = 0; rank < group->size(); ++rank) {
    sizes[static_cast<std::size_t>(dim)] = chunk_of(size, group->size(), rank).count;
    parts.push_back(at::empty(sizes, tensor.options()));
  }
  all_gather(parts, tensor.contiguous(), {.group = group});
  return at::cat(parts, dim);
}

struct CrossEdge : torch::autograd::Function<CrossEdge> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& tensor,
                        const c10::intrusive_ptr<RegionEdge>& edge) {
    ctx->saved_data["adjoint"] = at::IValue::make_capsule(edge->adjoint());
    return edge->run(tensor);
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto edge =
        c10::static_intrusive_pointer_cast<RegionEdge>(ctx->saved_data["adjoint"].toCapsule());
    return {apply(gradients[0], edge), Tensor()};
  }
};

Tensor cross(const Tensor& tensor, RegionKind kind, const Group& group, std::int64_t dim = 0,
             std::int64_t size = 0) {
  if (group->size() == 1) return tensor;
  return CrossEdge::apply(tensor, c10::make_intrusive<RegionEdge>(kind, group, dim, size));
}

std::int64_t dimension_of(const Tensor& tensor, std::int64_t dim, const char* who) {
  const std::int64_t found = dim < 0 ? dim + tensor.dim() : dim;
  if (found < 0 || found >= tensor.dim())
    group::invalid(std::string(who) + ": a tensor of sizes " +
                   tensor_parallel::text_of(tensor.sizes()) + " has no dimension " +
                   std::to_string(dim));
  return found;
}

void check_sequence(const Tensor& tensor, std::int64_t dim, const ProcessGroup& group,
                    const char* who) {
  if (tensor.size(dim) % group.size() != 0)
    group::invalid(std::string(who) + ": the sequence, dimension " + std::to_string(dim) + " of " +
                   tensor_parallel::text_of(tensor.sizes()) +
                   ", does not divide evenly among the " + std::to_string(group.size()) +
                   " ranks of the group; pad it");
}

}  // namespace

Tensor copy_to_tensor_parallel_region(const Tensor& tensor, const Group& group) {
  return cross(tensor, RegionKind::copy, tensor_parallel::member_group(group, __func__));
}

Tensor reduce_from_tensor_parallel_region(const Tensor& tensor, const Group& group) {
  return cross(tensor, RegionKind::reduce, tensor_parallel::member_group(group, __func__));
}

Tensor scatter_to_tensor_parallel_region(const Tensor& tensor, const Group& group,
                                         std::int64_t dim) {
  const Group members = tensor_parallel::member_group(group, __func__);
  dim = dimension_of(tensor, dim, __func__);
  return cross(tensor, RegionKind::scatter, members, dim, tensor.size(dim));
}

Tensor gather_from_tensor_parallel_region(const Tensor& tensor, const Group& group,
                                          std::int64_t dim, std::optional<std::int64_t> size) {
  const Group members = tensor_parallel::member_group(group, __func__);
  dim = dimension_of(tensor, dim, __func__);
  const std::int64_t whole = size.value_or(tensor.size(dim) * members->size());
  const std::int64_t mine = chunk_of(whole, *members).count;
  if (tensor.size(dim) != mine)
    group::invalid(std::string(__func__) + ": this rank's part of " + std::to_string(whole) +
                   " has " + std::to_string(mine) + " elements, and dimension " +
                   std::to_string(dim) + " of the tensor " + std::to_string(tensor.size(dim)));
  return cross(tensor, RegionKind::gather, members, dim, whole);
}

Tensor scatter_to_sequence_parallel_region(const Tensor& tensor, const Group& group,
                                           std::int64_t dim) {
  const Group members = tensor_parallel::member_group(group, __func__);
  dim = dimension_of(tensor, dim, __func__);
  check_sequence(tensor, dim, *members, __func__);
  return cross(tensor, RegionKind::scatter, members, dim, tensor.size(dim));
}

Tensor gather_from_sequence_parallel_region(const Tensor& tensor, const Group& group,
                                            std::int64_t dim, bool tensor_parallel_output_grad) {
  if (!tensor_parallel_output_grad) return gather_from_tensor_parallel_region(tensor, group, dim);
  const Group members = tensor_parallel::member_group(group, __func__);
  dim = dimension_of(tensor, dim, __func__);
  if (members->size() == 1) return tensor;
  const Tensor part = tensor.movedim(dim, 0).contiguous();
  auto sizes = part.sizes().vec();
  sizes[0] *= members->size();
  const Tensor whole =
      nn::all_gather_into_tensor(at::empty(sizes, part.options()), part, {.group = members});
  return whole.movedim(0, dim);
}

Tensor reduce_scatter_to_sequence_parallel_region(const Tensor& tensor, const Group& group,
                                                  std::int64_t dim) {
  const Group members = tensor_parallel::member_group(group, __func__);
  dim = dimension_of(tensor, dim, __func__);
  check_sequence(tensor, dim, *members, __func__);
  if (members->size() == 1) return tensor;
  const auto parts = tensor.movedim(dim, 0).contiguous().tensor_split(members->size());
  const Tensor sum =
      nn::reduce_scatter(at::empty_like(parts[0].detach()), parts, {.group = members});
  return sum.movedim(0, dim);
}

}  // namespace muster
