/// One piece of memory for several tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace muster::parallel {

/// Zeros, one dimension; where the other ranks of the host can read them in place, if there is
/// room.
at::Tensor flat_memory(std::int64_t elements, const at::TensorOptions& options);
/// The same, without values.
at::Tensor unset_memory(std::int64_t elements, const at::TensorOptions& options);

/// The stretch of `flat` from element `at` on, in the shape of `like`, and in its strides where
/// they leave no gaps. It shares the memory without being a view in autograd's eyes, which could
/// not be detached in place.
at::Tensor shaped_like(const at::Tensor& flat, std::int64_t at, const at::Tensor& like);

}  // namespace muster::parallel
