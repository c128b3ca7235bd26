/// Memory for tensors of the meta device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

namespace muster::parallel {

/// Gives a tensor of the meta device memory on `device`, with undefined values. It stays the same
/// tensor, for all who have it.
inline void materialize(const at::Tensor& tensor, at::Device device) {
  const at::NoGradGuard no_grad;
  const at::Tensor memory =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
}

}  // namespace muster::parallel
