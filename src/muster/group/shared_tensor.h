/// Tensors in memory that the other ranks of this host can map: collectives on them need no copying
/// in and out.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

namespace muster {

/// Like at::empty on the CPU, contiguous, in the process's arena. An ordinary tensor otherwise,
/// which moves to other memory where resize_() makes it larger; freed with its last reference.
/// Throws DistError (Code::exhausted) where the arena's limit is reached.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// Whether the tensor's memory is such, from `empty_shared` or the shared allocator: the other
/// ranks of the host can reach it where it is.
bool in_shared_memory(const at::Tensor& tensor);

}  // namespace muster
