/// Tensors in memory that the other ranks of this host can map. Collectives on them need no copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

namespace muster {

/// Like at::empty on the CPU: uninitialised and contiguous, in the process's arena. The tensor
/// behaves like any other. resize_() to a larger size moves it to other memory; it is freed with
/// its last reference. Throws DistError (Code::exhausted) at the arena's limit.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// Whether the tensor's memory is in the arena, from `empty_shared` or the shared allocator, so
/// that other ranks of the host can access it directly.
bool in_shared_memory(const at::Tensor& tensor);

}  // namespace muster
