/// Moves gradients into their buckets and averages back. Private to the reducer; under its lock.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/group/reduce_op.h"
#include "muster/parallel/gradient_hooks.h"
#include "muster/parallel/gradient_layout.h"
#include "muster/parallel/parameter_use.h"

namespace muster::parallel {

class GradientCopies {
 public:
  /// All of these must outlive this.
  GradientCopies(GradientLayout& layout, const ParameterUse& use, const ReducerOptions& options);

  void set_divisor(int ranks) { divisor_ = ranks; }
  /// A communication hook divides.
  void leave_undivided() { hooked_ = true; }

  void begin_pass();
  /// Of the gradient that arrives just now; `given` is what autograd has accumulated. It keeps that
  /// until its hooks have run, and may have made it the gradient itself.
  void note_owners(std::size_t index, const std::vector<at::Tensor>& given);
  /// Into its bucket, divided unless a hook or the reduction does that; or left where it lies.
  void fill(std::size_t index, const GradientHooks& hooks);
  /// Of a rank that had no input: adds nothing to the averages.
  void fill_with_zeros(GradientBucket& bucket);
  /// For what was not divided when it was filled in.
  ReduceOp averaging(at::ScalarType dtype) const;

  /// The averages become the gradients.
  void give_back(GradientBucket& bucket, const at::Tensor& averaged);
  /// Gradients of a rank that had no input, for an optimizer that steps all the same.
  void keep_averages(const GradientBucket& bucket, const at::Tensor& averaged);

  /// How many gradients of this pass travel where they lie.
  std::size_t in_place() const { return in_place_; }

 private:
  bool travels_in_place(std::size_t index, const at::Tensor& gradient,
                        const GradientHooks& hooks) const;
  void fill_sparse(std::size_t index);
  at::Tensor no_values(const at::Tensor& parameter) const;
  void give_back_dense(std::size_t index, const at::Tensor& averaged);
  void give_back_sparse(std::size_t index, const at::Tensor& averaged);

  GradientLayout& layout_;
  const ParameterUse& use_;
  const ReducerOptions& options_;
  double divisor_;
  bool hooked_ = false;
  /// How many tensors hold the memory of the gradient that arrives just now, if no user's does.
  struct {
    std::size_t index = SIZE_MAX;
    std::size_t count = 1;
  } owners_;
  std::size_t in_place_ = 0;
};

}  // namespace muster::parallel
