/// From tensors to spans and back, for one request.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/group/backends/device_copies.h"
#include "muster/group/backends/spare_args.h"
#include "muster/group/request.h"

namespace muster::group {

/// The memory that a request works on. A slice that is one contiguous tensor of the CPU is used
/// where it is; any other goes through a flat copy, which for tensors on an accelerator is pinned
/// memory of the host.
class Staging {
 public:
  /// Takes the request's tensors. `at_root` tells whether this member is the request's root.
  Staging(Request& request, bool at_root);

  const collective::Args& args() const { return *args_; }
  /// Copies flat inputs anew from the tensors, for another run.
  void refill();
  /// Whether `finish` runs operators of torch's, which may be slow, and the user's where a tensor
  /// is of a class of theirs.
  bool copies_back() const { return !copies_back_.empty(); }
  /// After success: copies flat outputs back into the tensors, and tells autograd that they have
  /// changed unless the request is quiet. On an accelerator the copies are enqueued on the stream
  /// that was current where the request was made.
  void finish();
  /// The accelerator's side, or null where the tensors are on the CPU.
  const DeviceCopies* device() const { return device_.get(); }
  /// The tensors of the output side.
  std::vector<at::Tensor> outputs() const;

 private:
  void copy_back();
  void copy_in(const at::Tensor& flat, const Slice& slice);
  at::Tensor flat_like(const Slice& slice);
  ConstBytes stage_input(const Slice& slice);
  MutableBytes stage_output(const Slice& slice, bool filled);

  SpareArgs args_;
  const bool quiet_;
  Slices inputs_, outputs_;
  std::unique_ptr<DeviceCopies> device_;
  std::vector<std::pair<at::Tensor, Slice>> copies_in_;
  std::vector<std::pair<at::Tensor, Slice>> copies_back_;
};

}  // namespace muster::group
