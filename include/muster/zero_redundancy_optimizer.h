// SPDX-License-Identifier: BSD-3-Clause
/// ZeroRedundancyOptimizer: an optimizer whose state is sharded across ranks.
///
/// Each parameter is assigned to one rank, which keeps its state, updates it and broadcasts it; a
/// rank holds about 1/n of the state of an optimizer such as Adam. Gradients must be equal on all
/// ranks, as with DistributedDataParallel; the weights are then bitwise equal to those of the
/// unsharded optimizer. Modelled on torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et
/// al., "ZeRO", SC 2020, stage 1.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/comm_hook.h"
#include "muster/join.h"
#include "muster/process_group.h"

namespace torch::optim {
class LBFGS;
}

namespace muster {

struct ZeroRedundancyOptions {
  Group process_group = nullptr;  ///< null: the default group
  /// A rank's parameters are contiguous in memory and are sent as one message.
  bool parameters_as_bucket_view = false;
  /// Backward performs the step (`hook_with_zero_step`); `step` does nothing.
  bool overlap_with_ddp = false;
};

namespace parallel {

/// Assigns each parameter to a rank: group by group, largest first, each to the rank with the
/// fewest elements so far. `elements[g][i]` is the size of parameter i of group g; the result has
/// the same shape. Later groups do not change earlier assignments.
std::vector<std::vector<int>> shard_parameters(
    const std::vector<std::vector<std::int64_t>>& elements, int ranks);

/// The part of ZeroRedundancyOptimizer that does not depend on the optimizer's type.
/// `param_groups()` are those of the whole optimizer: a change there, such as a learning rate set
/// by hand or by a scheduler, takes effect from the next step. `state()` is empty; this rank's
/// state is in `local()`.
class ShardedOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using MakeLocal = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>;

  ShardedOptimizer(const ParamGroups& param_groups,
                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, MakeLocal make,
                   const ZeroRedundancyOptions& options);
  ~ShardedOptimizer() override;

  /// Every member calls it with the same group. Hides the base's non-virtual method; call it on
  /// this type.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Updates this rank's parameters; then all members broadcast theirs. Returns the closure's
  /// result, if there is a closure. If an update throws on one rank, the group fails for that
  /// reason and the other ranks throw too. With overlap_with_ddp it does nothing, because backward
  /// has performed the step.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collects all members' state on rank `to` of the group. Every member calls it.
  void consolidate_state_dict(int to = 0);
  /// Writes the whole optimizer as of the last `consolidate_state_dict`, in the format of an
  /// unsharded one, so that either can load it. Throws DistError on a rank that did not collect it.
  /// `torch::save` does the same.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what an unsharded optimizer or `save` wrote, with any number of ranks, and keeps this
  /// rank's part. Every member loads the same.
  void load(torch::serialize::InputArchive& archive) override;
  /// As `save` and `load`, with bytes.
  std::string state_dict() const;
  void load_state_dict(const std::string& bytes);

  /// This rank's part of the optimizer; owned by this object.
  torch::optim::Optimizer& local();
  /// The group rank that owns a parameter of this optimizer.
  int rank_of(const at::Tensor& parameter) const;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  Group join_process_group() const override;

 private:
  friend CommHook hook_with_step(CommHook hook, ShardedOptimizer& optimizer);
  struct State;
  std::unique_ptr<State> state_of_shard_;
};

CommHook hook_with_step(CommHook hook, ShardedOptimizer& optimizer);

}  // namespace parallel

/// `Wrapped` is any class of torch::optim that treats each parameter separately (SGD, Adam, AdamW,
/// Adagrad, RMSprop, or your own), constructed from parameter groups and options. LBFGS uses all
/// parameters together and cannot be sharded. All members of the group construct it with parameters
/// of equal shapes; otherwise it throws on all of them. Not thread-safe. The tensors must outlive
/// it.
///
///   ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(),
///       torch::optim::AdamOptions(1e-3));
///   loss.backward();
///   optimizer.step();   // all ranks have the new weights
template <class Wrapped>
class ZeroRedundancyOptimizer : public parallel::ShardedOptimizer {
  static_assert(!std::is_same_v<Wrapped, torch::optim::LBFGS>,
                "LBFGS looks at all parameters together: it cannot be divided");

 public:
  template <class OptimizerOptions>
  ZeroRedundancyOptimizer(const ParamGroups& param_groups, OptimizerOptions defaults,
                          const ZeroRedundancyOptions& options = {})
      : ShardedOptimizer(
            param_groups, std::make_unique<OptimizerOptions>(defaults),
            [defaults](const ParamGroups& groups) {
              return std::make_unique<Wrapped>(groups, defaults);
            },
            options) {}
  template <class OptimizerOptions>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, OptimizerOptions defaults,
                          const ZeroRedundancyOptions& options = {})
      : ZeroRedundancyOptimizer(
            ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))},
            std::move(defaults), options) {}
};

/// For a model whose optimizer has `overlap_with_ddp`: averages as `hook` does, and performs each
/// bucket's step as soon as the bucket is averaged, while later buckets are still in flight. When
/// backward returns, every rank has the new weights and `step` has nothing to do.
/// find_unused_parameters is not supported: unused parameters are updated as with zero gradients.
/// mixed_precision throws. Delayed parameters are not updated, because no hook sees them. The
/// optimizer must outlive the model's use of it.
///
///   model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), optimizer));
inline CommHook hook_with_zero_step(CommHook hook, parallel::ShardedOptimizer& optimizer) {
  return parallel::hook_with_step(std::move(hook), optimizer);
}

}  // namespace muster
