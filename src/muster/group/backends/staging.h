/// From tensors to spans and back, for one request on CPU tensors.
#pragma once

#include <utility>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/group/backends/spare_args.h"
#include "muster/group/request.h"

namespace muster::group {

/// The memory that a request works on. A slice that is one contiguous tensor is used where it is; any other goes through a flat copy.
class Staging {
 public:
  /// Takes the request's tensors. `at_root` tells whether this member is the request's root.
  Staging(Request& request, bool at_root);

  const collective::Args& args() const { return *args_; }
  /// Copies flat inputs anew from the tensors, for another run.
  void refill();
  /// After success: copies flat outputs back into the tensors, and tells autograd that they have changed.
  void finish();
  /// The tensors of the output side.
  std::vector<at::Tensor> outputs() const;

 private:
  ConstBytes stage_input(const Slice& slice);
  MutableBytes stage_output(const Slice& slice, bool filled);

  SpareArgs args_;
  Slices inputs_, outputs_;
  std::vector<std::pair<at::Tensor, Slice>> copies_in_;
  std::vector<std::pair<at::Tensor, Slice>> copies_back_;
};

}  // namespace muster::group
