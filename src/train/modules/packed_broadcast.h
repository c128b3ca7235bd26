/// Broadcasts many tensors from one member of a group in few messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/process_group.h"

namespace muster::parallel {

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
