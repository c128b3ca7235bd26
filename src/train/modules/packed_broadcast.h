// SPDX-License-Identifier: BSD-3-Clause
/// One contiguous allocation for several tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <vector>

#include "muster/process_group.h"

namespace muster::parallel {
/// A one-dimensional tensor of zeros, in shared memory if there is room.
at::Tensor flat_memory(std::int64_t elements, const at::TensorOptions& options);
/// As flat_memory, but uninitialised.
at::Tensor unset_memory(std::int64_t elements, const at::TensorOptions& options);

/// The elements of `flat` from `at` on, with the shape of `like`, and with its strides if they
/// leave no gaps. Shares the memory but is not an autograd view, so it can be detached in place.
at::Tensor shaped_like(const at::Tensor& flat, std::int64_t at, const at::Tensor& like);

// Broadcasts many tensors from one member of a group in few messages.

/// Keeps its packing buffer for the next call. Not thread-safe.
class PackedBroadcast {
 public:
  /// Whether autograd sees the new values as an in-place change.
  enum class Autograd { notify, bypass };

  /// Broadcasts the tensors of `root`, a rank of `group`. All members pass tensors of equal sizes,
  /// dtypes and device types in the same order; strides may differ. Small CPU tensors are sent as
  /// one message regardless of dtype, small accelerator tensors as one per dtype, and all others
  /// separately. With Autograd::bypass, a graph recorded earlier can still run backward over the
  /// tensors, as when a second forward pass updates a module's buffers. Blocks until this member's
  /// part is done. Throws as broadcast() does.
  void send_from(const Group& group, int root, const std::vector<at::Tensor>& tensors,
                 Autograd autograd = Autograd::notify);

 private:
  at::Tensor memory_;  // packing buffer, as bytes
};

}  // namespace muster::parallel
