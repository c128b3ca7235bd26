// SPDX-License-Identifier: BSD-3-Clause
/// Periodic averaging of the ranks' model weights, instead of their gradients; and post-local SGD,
/// which averages gradients globally at first, then only within small groups.
///
/// Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; names as in
/// torch's ddp_comm_hooks and algorithms.model_averaging.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "muster/comm_hook.h"
#include "muster/process_group.h"

namespace muster {

/// Replaces every parameter that has a gradient by its average over `group` (null: the default
/// group). Parameters without a gradient are unchanged. All members pass the same parameters, with
/// gradients for the same ones. Does nothing on a non-member.
void average_parameters(const std::vector<at::Tensor>& parameters, const Group& group = nullptr);

struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;  ///< steps between averages
  /// Steps before the first average. Average the gradients during these.
  std::int64_t warmup_steps = 0;
  Group process_group = nullptr;  ///< null: the default group
};

/// torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager. All ranks
/// construct it with the same options.
class PeriodicModelAverager {
 public:
  using Options = PeriodicModelAveragerOptions;
  /// Throws DistError if the period is below 1 or warmup_steps is negative.
  explicit PeriodicModelAverager(const Options& options);

  /// Call after each optimizer step. Averages in step warmup_steps (counted from 0) and every
  /// `period` steps from there.
  void average_parameters(const std::vector<at::Tensor>& parameters);
  void average_parameters(const torch::optim::Optimizer& optimizer);

  /// Steps so far. Set it when resuming from a checkpoint.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step) { step_ = step; }

 private:
  Options options_;
  std::int64_t step_ = 0;
};

struct PostLocalSGDOptions {
  Group process_group = nullptr;  ///< averages the first passes; null: the model's group
  /// This rank's group for averaging the later passes. Null: the ranks of one host; every rank of
  /// the job then takes part in creating it.
  Group subgroup = nullptr;
  std::int64_t start_localSGD_iter = 100;     ///< backward passes averaged globally
  bool post_local_gradient_allreduce = true;  ///< false: later gradients are not averaged
};

class PostLocalSGDState {
 public:
  /// Collective if it must create `subgroup`.
  explicit PostLocalSGDState(const PostLocalSGDOptions& options = {});
  const PostLocalSGDOptions& options() const { return options_; }
  /// Backward passes so far.
  std::int64_t iteration() const { return iteration_; }

 private:
  friend CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);
  PostLocalSGDOptions options_;
  std::int64_t iteration_ = 0;
};

/// Use it with a PeriodicModelAverager whose warmup_steps equal start_localSGD_iter.
CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

}  // namespace muster
