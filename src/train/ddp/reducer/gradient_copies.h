// SPDX-License-Identifier: BSD-3-Clause
/// Copies gradients into buckets and averages back. Private to the reducer; called under its lock.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/op.h"
#include "train/ddp/parameter_use.h"
#include "train/ddp/reducer/gradient_hooks.h"
#include "train/ddp/reducer/gradient_layout.h"

namespace muster::parallel {

class GradientCopies {
 public:
  /// The arguments must outlive this object.
  GradientCopies(GradientLayout& layout, const ParameterUse& use, const ReducerOptions& options);

  void set_divisor(int ranks) { divisor_ = ranks; }
  /// A communication hook will divide.
  void set_hooked() { hooked_ = true; }

  void begin_pass();
  /// Records how many tensors own the arriving gradient's memory. `given` is what autograd
  /// accumulated; autograd keeps it until its hooks have run, and may have made it the gradient
  /// itself.
  void record_owners(std::size_t index, const std::vector<at::Tensor>& given);
  /// Copies the gradient into its bucket, divided unless a hook or the reduction divides; or leaves
  /// it to be reduced in place.
  void fill(std::size_t index, const GradientHooks& hooks);
  /// For a rank without input: contributes zeros to the averages.
  void fill_with_zeros(GradientBucket& bucket);
  /// The reduction for gradients that fill() did not divide.
  ReduceOp averaging(at::ScalarType dtype) const;

  /// Stores the averages as the gradients.
  void store_averages(GradientBucket& bucket, const at::Tensor& averaged);
  /// Stores the averages on a rank without input, for an optimizer that steps regardless.
  void store_averages_without_input(const GradientBucket& bucket, const at::Tensor& averaged);

  /// Number of gradients of this pass that are reduced in place.
  std::size_t in_place() const { return in_place_; }

 private:
  bool can_reduce_in_place(std::size_t index, const at::Tensor& gradient,
                           const GradientHooks& hooks) const;
  void fill_sparse(std::size_t index);
  at::Tensor empty_sparse_gradient(const at::Tensor& parameter) const;
  void store_dense(std::size_t index, const at::Tensor& averaged);
  void store_sparse(std::size_t index, const at::Tensor& averaged);

  GradientLayout& layout_;
  const ParameterUse& use_;
  const ReducerOptions& options_;
  double divisor_;
  bool hooked_ = false;
  /// Number of tensors that own the arriving gradient's memory if no user tensor does.
  struct {
    std::size_t index = SIZE_MAX;
    std::size_t count = 1;
  } owners_;
  std::size_t in_place_ = 0;
};

}  // namespace muster::parallel
