/// Tensors whose memory can be used as it is.
#pragma once

#include <ATen/core/Tensor.h>

#include "muster/base/bytes.h"

namespace muster::group {

namespace plain_detail {
/// What every dense tensor of the CPU may have besides being that: autograd and the like, which do
/// not change what its memory is.
inline constexpr c10::DispatchKeySet kHarmless({c10::DispatchKey::AutogradFunctionality,
                                                c10::DispatchKey::ADInplaceOrView,
                                                c10::DispatchKey::AutocastCPU});
inline constexpr c10::DispatchKeySet kDense(c10::DispatchKey::CPU);
}  // namespace plain_detail

/// Whether the bytes from its data pointer on are its elements in order, in the host's memory: it
/// is dense, on the CPU, contiguous, and neither conjugated, negated, quantized, nested nor a
/// tensor of another kind.
inline bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();  // an undefined one has no keys
  if ((impl->key_set().raw_repr() & ~plain_detail::kHarmless.raw_repr()) ==
      plain_detail::kDense.raw_repr()) [[likely]]
    return impl->is_contiguous();
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor.is_nested() && !tensor._is_zerotensor() &&
         !impl->key_set().has(c10::DispatchKey::Python);
}

/// Whether its elements are one strided array of numbers, wherever that is.
inline bool is_one_array(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested();
}

/// Of a plain tensor.
inline std::size_t plain_size(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return static_cast<std::size_t>(impl->numel()) * impl->itemsize();
}
inline ConstBytes plain_bytes(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), plain_size(tensor)};
}
inline MutableBytes plain_mutable_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), plain_size(tensor)};
}

/// Tells autograd that a call has written it. Tensors of inference mode count nothing.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace muster::group
