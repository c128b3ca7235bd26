// SPDX-License-Identifier: BSD-3-Clause
/// Memory of sharded parameters, for the files of ShardedParameters alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace muster::parallel {

inline std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

/// The elements of `tensor` as one dimension, in the memory order of `like`; a copy if the layouts
/// differ.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like);

/// `view`, which is dense, in a storage of its own that begins at its first element and keeps the
/// memory of `view` alive. torch takes a DTensor for a wrapper only where its local tensor begins
/// its storage, and saves a tensor with all of its storage.
at::Tensor with_own_storage(const at::Tensor& view);

/// Allocates memory for `tensor` after it was freed.
void allocate_memory(const at::Tensor& tensor);
/// The tensors in it persist.
void free_memory(const at::Tensor& tensor);

}  // namespace muster::parallel
