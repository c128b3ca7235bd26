/// One contiguous allocation for several tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace muster::parallel {

/// A one-dimensional tensor of zeros, in shared memory if there is room.
at::Tensor flat_memory(std::int64_t elements, const at::TensorOptions& options);
/// As flat_memory, but uninitialised.
at::Tensor unset_memory(std::int64_t elements, const at::TensorOptions& options);

/// The elements of `flat` from `at` on, with the shape of `like`, and with its strides if they
/// leave no gaps. Shares the memory but is not an autograd view, so it can be detached in place.
at::Tensor shaped_like(const at::Tensor& flat, std::int64_t at, const at::Tensor& like);

}  // namespace muster::parallel
