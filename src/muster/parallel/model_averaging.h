/// Averaging the weights of the ranks' models instead of their gradients, now and then.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

#include "muster/group/process_group.h"

namespace muster {

/// Every member's parameters become their average over `group` (null: the default group), where
/// they have a gradient: those that are not trained stay. All members give the same parameters,
/// with gradients for the same ones. Nothing happens on a non-member.
void average_parameters(const std::vector<at::Tensor>& parameters, const Group& group = nullptr);

struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< steps from one average to the next
  std::int64_t warmup_steps = 0;  ///< steps before the first; there the gradients are averaged
  Group process_group = nullptr;  ///< null: the default group
};

/// torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager. Made alike on all
/// ranks.
class PeriodicModelAverager {
 public:
  using Options = PeriodicModelAveragerOptions;
  /// Throws DistError for a period below 1 or negative warmup_steps.
  explicit PeriodicModelAverager(const Options& options);

  /// After each step of the optimizer: averages in step warmup_steps (counted from 0) and every
  /// `period` steps from there.
  void average_parameters(const std::vector<at::Tensor>& parameters);
  void average_parameters(const torch::optim::Optimizer& optimizer);

  /// Steps so far; set it when training goes on from a checkpoint.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step) { step_ = step; }

 private:
  Options options_;
  std::int64_t step_ = 0;
};

}  // namespace muster
