/// From tensors to spans and back, for one call.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/group/backends/device_copies.h"
#include "muster/group/call.h"

namespace muster::group {

/// The memory that a call works on whose tensors are not all dense and the CPU's. A slice that is
/// one such tensor is used where it is; any other goes through a flat copy, which for tensors on an
/// accelerator is pinned memory of the host.
class Staging {
 public:
  /// Puts the memory in `args`. `at_root` tells whether this member is the call's root.
  Staging(const CallTensors& tensors, collective::Args& args, bool at_root);

  /// Copies flat inputs anew from the tensors, for another run.
  void refill();
  bool copies_back() const { return !copies_back_.empty(); }
  /// After success: copies flat outputs back into the tensors, where `quiet` without a word to
  /// autograd. On an accelerator the copies are enqueued on the stream that was current where the
  /// call was made.
  void finish(bool quiet);
  /// The accelerator's side, or null where the tensors are on the CPU.
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
