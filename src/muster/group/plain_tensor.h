/// Tensors whose memory can be used as it is.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::group {

/// Whether the bytes from its data pointer on are its elements in order, in the host's memory.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.is_quantized();
}

/// Tells autograd that a call has written it. Tensors of inference mode count nothing.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace muster::group
