// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/gradient_copies.h"

#include <ATen/ScalarOps.h>

#include <cstring>

#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

/// Number of tensors owning the memory of `gradient`, including itself, if only autograd refers to
/// them while its hook runs.
std::size_t autograd_owner_count(const at::Tensor& gradient, const std::vector<at::Tensor>& given) {
  if (!gradient.defined() || gradient.layout() != at::kStrided || given.size() != 1) return 1;
  const at::Tensor& source = given.front();  // autograd may have made the gradient from it
  if (!source.defined() || source.use_count() != 1 || source.layout() != at::kStrided ||
      !gradient.is_alias_of(source))
    return 1;
  if (!source.is_view()) return 2;
  const at::TensorBase base = source._base();  // e.g. the matrix whose transpose is the source
  return base.use_count() == 2 ? 3 : 2;
}

/// Whether both tensors have their elements in memory in the same order. Most gradients are so
/// small that calling an operator costs more than its work.
bool same_memory_order(const at::Tensor& a, const at::Tensor& b) {
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided &&
           tensor.scalar_type() == at::kFloat && !tensor.is_neg() &&
           tensor.is_non_overlapping_and_dense();
  };
  return plain(a) && plain(b) && a.sizes() == b.sizes() && a.strides() == b.strides();
}

void multiply(const at::Tensor& place, const at::Tensor& gradient, float factor) {
  auto* to = place.mutable_data_ptr<float>();
  const auto* from = gradient.const_data_ptr<float>();
  for (std::int64_t i = 0, count = gradient.numel(); i < count; ++i) to[i] = from[i] * factor;
}

}  // namespace

GradientCopies::GradientCopies(GradientLayout& layout, const ParameterUse& use,
                               const ReducerOptions& options)
    : layout_(layout), use_(use), options_(options), divisor_(options.group->size()) {}

void GradientCopies::begin_pass() {
  in_place_ = 0;
  for (GradientBucket& bucket : layout_.buckets()) {
    bucket.pending = bucket.indices.size();
    bucket.in_place = at::Tensor();
  }
}

void GradientCopies::record_owners(std::size_t index, const std::vector<at::Tensor>& given) {
  owners_ = {index, autograd_owner_count(layout_.parameters()[index].grad(), given)};
}

// ---- into the buckets

/// Whether only the parameter and this reducer refer to this pass's gradient, and its layout is the
/// same on all ranks.
bool GradientCopies::can_reduce_in_place(std::size_t index, const at::Tensor& gradient,
                                         const GradientHooks& hooks) const {
  const at::Tensor& parameter = layout_.parameters()[index];
  const bool same_layout = gradient.strides() == parameter.strides() ||
                           (gradient.is_contiguous() && parameter.is_contiguous());
  const std::size_t expected = owners_.index == index ? owners_.count : 1;
  return use_.has_gradient(index) && gradient.scalar_type() == layout_.bucket_of(index).dtype &&
         !gradient.requires_grad() && !gradient.is_neg() && gradient.is_cpu() &&
         gradient.is_non_overlapping_and_dense() && same_layout && hooks.is_only_hook(index) &&
         gradient.storage().use_count() == expected;
}

void GradientCopies::fill(std::size_t index, const GradientHooks& hooks) {
  if (layout_.is_sparse(index)) return fill_sparse(index);
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = layout_.parameters()[index].mutable_grad();
  GradientBucket& bucket = layout_.bucket_of(index);
  if (bucket.alone && gradient.defined() && !gradient.is_sparse() &&
      can_reduce_in_place(index, gradient, hooks)) {
    bucket.in_place =
        at::empty({0}, gradient.options())
            .set_(gradient.storage(), gradient.storage_offset(), {gradient.numel()}, {1});
    ++in_place_;
    return;
  }
  at::Tensor place = layout_.view(index);
  if (!gradient.defined()) {
    place.zero_();
    return;
  }
  if (gradient.is_sparse())
    throw DistError("the gradient of " + layout_.name(index) +
                        " is sparse, which was not expected: only those of Embedding and "
                        "EmbeddingBag modules made with sparse(true) may be",
                    Code::invalid_argument);
  if (gradient.is_alias_of(place)) {
    if (!hooked_) place.div_(divisor_);
    return;
  }
  if (hooked_ || bucket.alone) {
    place.copy_(gradient.detach());
  } else if (place.scalar_type() != gradient.scalar_type()) {
    place.copy_(gradient.detach())
        .div_(divisor_);  // the product would have only the narrower type's precision
  } else if (same_memory_order(place, gradient)) {
    multiply(place, gradient, static_cast<float>(1.0 / divisor_));
  } else {
    at::mul_out(place, gradient.detach(), at::native::wrapped_scalar_tensor(1.0 / divisor_));
  }
  if (options_.gradient_as_bucket_view) gradient = place;
}

/// The sparse gradient of an unused parameter.
at::Tensor GradientCopies::empty_sparse_gradient(const at::Tensor& parameter) const {
  const auto options_of = at::TensorOptions(layout_.reduction_dtype(parameter))
                              .device(parameter.device())
                              .layout(at::kSparse);
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(), options_of);
}

/// The bucket's memory is the sparse gradient itself.
void GradientCopies::fill_sparse(std::size_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = layout_.parameters()[index].grad();
  at::Tensor& memory = layout_.bucket_of(index).memory;
  if (!gradient.defined()) {
    memory = empty_sparse_gradient(layout_.parameters()[index]);
    return;
  }
  memory = (gradient.is_sparse() ? gradient.detach() : gradient.detach().to_sparse(1))
               .to(layout_.reduction_dtype(layout_.parameters()[index]));
  memory = hooked_ ? memory.clone() : memory.div(divisor_);
}

void GradientCopies::fill_with_zeros(GradientBucket& bucket) {
  bucket.pending = 0;
  if (bucket.sparse) {
    bucket.memory = empty_sparse_gradient(layout_.parameters()[bucket.indices.front()]);
    return;
  }
  if (!bucket.memory.defined()) layout_.allocate_memory(bucket);
  bucket.memory.zero_();
}

/// The mean of many 16-bit floats may be representable when their sum is not.
ReduceOp GradientCopies::averaging(at::ScalarType dtype) const {
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  return wide && divisor_ == options_.group->size() ? ReduceOp(ReduceOp::AVG)
                                                    : ReduceOp::premul_sum(1.0 / divisor_);
}

// ---- and back

void GradientCopies::store_averages(GradientBucket& bucket, const at::Tensor& averaged) {
  const std::size_t first = bucket.indices.front();
  if (bucket.sparse) {
    store_sparse(first, averaged);
    bucket.memory = at::Tensor();
  } else if (bucket.in_place.defined()) {
    const at::Tensor& parameter = layout_.parameters()[first];
    // The user may have replaced the gradient meanwhile.
    if (!parameter.grad().defined() || !parameter.grad().is_alias_of(bucket.in_place))
      store_dense(first, shaped_like(bucket.in_place, 0, parameter));
    bucket.in_place = at::Tensor();
  } else {
    for (const std::size_t index : bucket.indices) store_dense(index, layout_.view(index));
  }
}

void GradientCopies::store_dense(std::size_t index, const at::Tensor& averaged) {
  if (use_.is_unused_everywhere(index)) return;
  at::Tensor& gradient = layout_.parameters()[index].mutable_grad();
  if (options_.gradient_as_bucket_view) {
    if (!gradient.defined() || !gradient.is_alias_of(averaged)) gradient = averaged;
    return;
  }
  if (options_.reduce_dtype && gradient.defined() &&
      gradient.scalar_type() != averaged.scalar_type()) {
    gradient =
        averaged.to(at::promote_types(gradient.scalar_type(), averaged.scalar_type()), false, true);
  } else if (!gradient.defined()) {
    gradient = averaged.clone();
  } else if (same_memory_order(gradient, averaged)) {
    std::memcpy(gradient.mutable_data_ptr(), averaged.const_data_ptr(), gradient.nbytes());
    group::mark_written(gradient);
  } else {
    gradient.copy_(averaged);
  }
}

void GradientCopies::store_sparse(std::size_t index, const at::Tensor& averaged) {
  if (use_.is_unused_everywhere(index)) return;
  at::Tensor& gradient = layout_.parameters()[index].mutable_grad();
  const bool dense = gradient.defined() && !gradient.is_sparse();
  const at::Tensor back = averaged.to(
      gradient.defined() ? gradient.scalar_type() : layout_.parameters()[index].scalar_type());
  gradient = dense ? back.to_dense() : back;
}

void GradientCopies::store_averages_without_input(const GradientBucket& bucket,
                                                  const at::Tensor& averaged) {
  for (const std::size_t index : bucket.indices) {
    at::Tensor& gradient = layout_.parameters()[index].mutable_grad();
    if (use_.is_unused_everywhere(index)) {
      gradient.reset();  // an optimizer must not use a gradient of an earlier iteration
    } else if (bucket.sparse) {
      gradient = averaged.to(layout_.parameters()[index].scalar_type());
    } else if (options_.gradient_as_bucket_view) {
      gradient = layout_.view(index);
    } else {
      gradient = layout_.view(index).to(layout_.parameters()[index].scalar_type(),
                                        /*non_blocking=*/false, /*copy=*/true);
    }
  }
}

}  // namespace muster::parallel
