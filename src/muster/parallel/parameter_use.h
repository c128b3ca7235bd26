/// Which parameters a pass uses, here and on other ranks. Private to the reducer; under its lock.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "muster/group/work.h"
#include "muster/parallel/gradient_hooks.h"
#include "muster/parallel/reducer.h"

namespace muster::parallel {

class ParameterUse {
 public:
  /// `options` must outlive this.
  ParameterUse(std::size_t parameters, const ReducerOptions& options);

  // ---- here, in this pass

  /// Before backward on `outputs`.
  void begin_pass(const GradientHooks& hooks, std::span<const at::Tensor> outputs);
  void note_gradient(std::size_t index) { mask_.mutable_data_ptr<int>()[index] = 1; }
  bool got_gradient(std::size_t index) const { return mask_.const_data_ptr<int>()[index] != 0; }
  /// Parameters that will get no gradient in this pass; nothing when asked again.
  std::vector<std::size_t> take_unused() {
    return std::exchange(unused_taken_, true) ? std::vector<std::size_t>() : unused_;
  }
  const std::vector<std::size_t>& unused() const { return unused_; }

  // ---- static graphs: every pass uses the same parameters as often as the first

  bool is_first_static_pass() const { return options_.static_graph && !static_known_; }
  void count_first(std::size_t index) {
    if (++static_counts_[index] == 1) static_order_.push_back(index);
  }
  /// Whether more gradients of the parameter come in this pass.
  bool comes_again(std::size_t index) { return options_.static_graph && --static_left_[index] > 0; }
  /// The first pass is over: only now is known which gradients come, and how often. All parameters,
  /// in the order in which they came.
  std::vector<std::size_t> end_first_static_pass();
  /// Once for all passes: what no rank's graph holds will never get a gradient.
  void learn_static_use();

  // ---- on all ranks

  /// Whether each pass has to find out.
  bool is_shared() const { return options_.find_unused_parameters && !options_.static_graph; }
  void share(bool async);
  void wait_shared();
  /// Such a parameter keeps what it had, so that an optimizer leaves it alone.
  bool nobody_used(std::size_t index) const;
  void clear() { mask_.zero_(); }

 private:
  const ReducerOptions& options_;
  at::Tensor mask_;  // 1 for each parameter that got a gradient here since the last reduction; then
                     // the sum over the ranks
  WorkRef sharing_;
  std::vector<std::size_t> unused_;  // found in this pass's graph
  bool unused_taken_ = false;
  bool static_known_ = false;
  std::vector<bool> static_use_;    // by any rank; empty until it is known
  std::vector<int> static_counts_;  // how often each gradient came in the first pass
  std::vector<int> static_left_;    // and will still come in this one
  std::vector<std::size_t> static_order_;
};

}  // namespace muster::parallel
