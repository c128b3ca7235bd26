// SPDX-License-Identifier: BSD-3-Clause
/// Tracks the parameters a pass uses, on this rank and on others. Private to the reducer; called
/// under its lock.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "muster/work.h"
#include "train/ddp/reducer/gradient_hooks.h"
#include "train/ddp/reducer/reducer.h"

namespace muster::parallel {

class ParameterUse {
 public:
  /// `options` must outlive this object.
  ParameterUse(std::size_t parameters, const ReducerOptions& options);

  // ---- here, in this pass

  /// Call before backward on `outputs`.
  void begin_pass(const GradientHooks& hooks, std::span<const at::Tensor> outputs);
  void record_gradient(std::size_t index) { mask_.mutable_data_ptr<int>()[index] = 1; }
  bool has_gradient(std::size_t index) const { return mask_.const_data_ptr<int>()[index] != 0; }
  /// Parameters that get no gradient in this pass; empty on later calls.
  std::vector<std::size_t> consume_unused() {
    return std::exchange(unused_taken_, true) ? std::vector<std::size_t>() : unused_;
  }
  const std::vector<std::size_t>& unused() const { return unused_; }

  // ---- static graphs: every pass uses the same parameters as often as the first

  bool is_first_static_pass() const { return options_.static_graph && !static_known_; }
  void record_first_pass(std::size_t index) {
    if (++static_counts_[index] == 1) static_order_.push_back(index);
  }
  /// Whether the parameter gets further gradients in this pass.
  bool has_more_gradients(std::size_t index) {
    return options_.static_graph && --static_left_[index] > 0;
  }
  /// Ends the first pass, which determines which gradients come and how often. Returns all
  /// parameters in the order their gradients came.
  std::vector<std::size_t> end_first_static_pass();
  /// Called once: determines the parameters that no rank's graph uses.
  void exchange_static_use();

  // ---- on all ranks

  /// Whether use must be exchanged in each pass.
  bool is_exchanged() const { return options_.find_unused_parameters && !options_.static_graph; }
  void exchange(bool async);
  void wait_for_exchange();
  /// True if no rank used the parameter; it keeps its old gradient, so that an optimizer leaves it
  /// unchanged.
  bool is_unused_everywhere(std::size_t index) const;
  void clear() { mask_.zero_(); }

 private:
  const ReducerOptions& options_;
  // 1 for each parameter that got a gradient here since the last reduction; after exchange(), the
  // sum over ranks.
  at::Tensor mask_;
  at::Tensor exchanged_;  // mask_, or its copy where the group has its tensors, during exchange()
  WorkRef exchange_work_;
  std::vector<std::size_t> unused_;  // according to this pass's graph
  bool unused_taken_ = false;
  bool static_known_ = false;
  std::vector<bool> static_use_;    // used by any rank; empty until known
  std::vector<int> static_counts_;  // gradients per parameter in the first pass
  std::vector<int> static_left_;    // gradients still to come in this pass
  std::vector<std::size_t> static_order_;
};

}  // namespace muster::parallel
