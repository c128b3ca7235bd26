// SPDX-License-Identifier: BSD-3-Clause
/// Tensors whose memory can be used directly, and the engine's types of their elements.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "core/base/bytes.h"
#include "core/base/dtype.h"

namespace muster::group {

namespace dense_detail {
/// Keys a dense CPU tensor may have that do not affect its memory, such as autograd's.
inline constexpr c10::DispatchKeySet kIgnoredKeys({c10::DispatchKey::AutogradFunctionality,
                                                   c10::DispatchKey::ADInplaceOrView,
                                                   c10::DispatchKey::AutocastCPU});
inline constexpr c10::DispatchKeySet kDenseKeys(c10::DispatchKey::CPU);
}  // namespace dense_detail

/// Whether the tensor's elements are contiguous in order from its data pointer in host memory:
/// dense, on the CPU, contiguous, and neither conjugated, negated, quantized, nested nor of another
/// kind.
inline bool is_dense_cpu(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();  // an undefined one has no keys
  if ((impl->key_set().raw_repr() & ~dense_detail::kIgnoredKeys.raw_repr()) ==
      dense_detail::kDenseKeys.raw_repr()) [[likely]]
    return impl->is_contiguous();
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor.is_nested() && !tensor._is_zerotensor() &&
         !impl->key_set().has(c10::DispatchKey::Python);
}

/// Whether the tensor is a strided array of plain elements, on any device.
inline bool is_one_array(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested();
}

/// Requires is_dense_cpu(tensor).
inline std::size_t dense_size(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return static_cast<std::size_t>(impl->numel()) * impl->itemsize();
}
inline ConstBytes dense_bytes(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), dense_size(tensor)};
}
inline MutableBytes dense_mutable_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), dense_size(tensor)};
}

/// Marks the tensor as modified for autograd. Inference tensors have no version counter.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Maps torch's scalar types to the engine's element types. Types that the engine cannot reduce
/// become `raw8` to `raw64` by width. torch has no other 16-byte type.
inline DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::boolean;
    case at::kByte: return DType::uint8;
    case at::kChar: return DType::int8;
    case at::kShort: return DType::int16;
    case at::kInt: return DType::int32;
    case at::kLong: return DType::int64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kComplexFloat: return DType::complex64;
    case at::kComplexDouble: return DType::complex128;
    default: break;
  }
  switch (c10::elementSize(type)) {
    case 1: return DType::raw8;
    case 2: return DType::raw16;
    case 4: return DType::raw32;
    default: return DType::raw64;
  }
}

}  // namespace muster::group
