/// Post-local SGD: averages gradients globally at first, then only within small groups, and
/// averages the models periodically.
///
/// Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; names as in
/// torch's ddp_comm_hooks and algorithms.model_averaging.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "muster/group/process_group.h"
#include "muster/parallel/comm_hook.h"

namespace muster {

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
