/// Post-local SGD: averaging every gradient at first, then only inside small groups, with the
/// models averaged now and then.
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
  Group process_group = nullptr;  ///< averages the first passes; null: the model's own
  Group subgroup = nullptr;  ///< this rank's, averages the later ones; null: the ranks of one host
                             ///< (every rank of the job makes it then)
  std::int64_t start_localSGD_iter = 100;     ///< backward passes that everybody averages
  bool post_local_gradient_allreduce = true;  ///< false: later gradients are not averaged at all
};

class PostLocalSGDState {
 public:
  /// Collective where it has to make `subgroup`.
  explicit PostLocalSGDState(const PostLocalSGDOptions& options = {});
  const PostLocalSGDOptions& options() const { return options_; }
  /// Backward passes so far.
  std::int64_t iteration() const { return iteration_; }

 private:
  friend CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);
  PostLocalSGDOptions options_;
  std::int64_t iteration_ = 0;
};

/// Use it with a PeriodicModelAverager whose warmup_steps are start_localSGD_iter.
CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

}  // namespace muster
