/// Copies one call's tensors to spans and back.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/group/backends/device_copies.h"
#include "core/group/call/call.h"

namespace muster::group {

/// The memory of a call whose tensors are not all dense and on the CPU. A slice that is one dense
/// CPU tensor is used directly. Any other slice is copied to a flat buffer, which is pinned host
/// memory for accelerator tensors.
class Staging {
 public:
  /// Sets the memory in `args`. `at_root` tells whether this member is the call's root.
  Staging(const CallTensors& tensors, collective::Args& args, bool at_root);

  /// Copies the inputs again, for another run.
  void refill();
  bool copies_back() const { return !copies_back_.empty(); }
  /// Call after success. Copies flat outputs back into the tensors; `quiet` does not mark them as
  /// written for autograd. On an accelerator, the copies are enqueued on the stream that was
  /// current when the call was made.
  void finish(bool quiet);
  /// The accelerator's copies, or null for CPU tensors.
  const DeviceCopies* device() const { return device_.get(); }

 private:
  void copy_back();
  void copy_in(const at::Tensor& flat, const Slice& slice);
  at::Tensor flat_like(const Slice& slice);
  ConstBytes stage_input(const Slice& slice);
  MutableBytes stage_output(const Slice& slice, bool filled);

  std::unique_ptr<DeviceCopies> device_;
  std::vector<std::pair<at::Tensor, Slice>> copies_in_;
  std::vector<std::pair<at::Tensor, Slice>> copies_back_;
};

}  // namespace muster::group
