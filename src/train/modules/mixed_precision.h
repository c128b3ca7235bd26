// SPDX-License-Identifier: BSD-3-Clause
/// Casts a module's parameters to a lower precision for forward and backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "muster/module_wrapper.h"

namespace muster {

namespace parallel {

/// Casts `tensor` to `dtype` if `dtype` is given and the tensor is floating-point.
at::Tensor cast_floating_point(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);
/// As cast_floating_point, in place: each tensor keeps its identity.
void cast_in_place(const std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype);

/// Switches the parameters of one module between the two dtypes. Not thread-safe. Owned by a
/// shared_ptr.
class LowPrecision : public std::enable_shared_from_this<LowPrecision> {
 public:
  /// Casts the buffers.
  LowPrecision(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& buffers,
               const MixedPrecision& config);

  /// Switches the parameters to param_dtype. Returns whether it did. Existing gradients are
  /// unchanged and accumulate in their own dtype.
  bool lower();
  /// Switches back to the full parameters, and casts gradients to the dtype the optimizer expects.
  void restore();
  /// True between lower() and restore().
  bool is_low() const { return !full_.empty(); }
  /// Call after a forward pass that records gradients: its graph needs the parameters as they are
  /// until its backward ends. If gradients are produced (`trained`), the end of backward calls
  /// restore(); if every parameter is frozen, this object does.
  void watch(const std::vector<at::Tensor>& outputs, bool trained);
  /// restore(), unless the backward of a watched pass may still come.
  void restore_if_over();
  /// Casts an argument of forward.
  at::Tensor cast(const at::Tensor& input) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> full_;  // what restore() restores; empty while not lowered
  // Expire with the watched outputs.
  std::weak_ptr<const void> trained_, frozen_;
  MixedPrecision config_;
};

}  // namespace parallel
}  // namespace muster
