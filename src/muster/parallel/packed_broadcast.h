/// Many tensors from one member of a group to the others, in few messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/group/process_group.h"

namespace muster::parallel {

/// Keeps the memory in which small tensors are packed, for the next call. Used by one thread at a
/// time.
class PackedBroadcast {
 public:
  /// Whether autograd counts the values as a change in place.
  enum class Autograd { told, not_told };

  /// Gives every member `root`'s values (a rank of `group`). All members pass tensors of the same
  /// sizes, dtypes and kinds of device in the same order; strides are each member's own. Small
  /// tensors of the CPU travel as one message whatever their dtypes, those of an accelerator as one
  /// of each dtype, others alone. Where autograd is not told, a graph made before may still run
  /// backward over the tensors, as over a module's buffers that a second forward pass brings up to
  /// date. Blocks until this member's part is done. Throws what broadcast() throws.
  void send_from(const Group& group, int root, const std::vector<at::Tensor>& tensors,
                 Autograd autograd = Autograd::told);

 private:
  at::Tensor memory_;  // bytes
};

}  // namespace muster::parallel
