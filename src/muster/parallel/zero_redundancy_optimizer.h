/// ZeroRedundancyOptimizer: an optimizer whose state is divided among the ranks.
///
/// Each parameter belongs to one rank, which keeps its state, updates it and sends it to the
/// others: a rank holds about 1/n of what Adam and its like remember. Gradients must be the same on
/// all ranks (DistributedDataParallel sees to it); then the weights are, bit for bit, what the
/// undivided optimizer makes of them. After torch.distributed.optim.ZeroRedundancyOptimizer;
/// Rajbhandari et al., "ZeRO", SC 2020, the first of its stages.
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

#include "muster/group/process_group.h"
#include "muster/parallel/comm_hook.h"
#include "muster/parallel/join.h"

namespace torch::optim {
class LBFGS;
}

namespace muster {

struct ZeroRedundancyOptions {
  Group process_group = nullptr;  ///< null: the default group
  bool parameters_as_bucket_view =
      false;  ///< a rank's parameters lie in one piece of memory and travel as one message
  bool overlap_with_ddp =
      false;  ///< backward takes the step (`hook_with_zero_step`); `step` does nothing
};

namespace parallel {

/// Which rank keeps each parameter: group by group, the largest first, each to the rank that has
/// the fewest elements so far. `elements[g][i]` is the size of parameter i of group g; the result
/// has the same shape. Later groups do not change what earlier ones got.
std::vector<std::vector<int>> shard_parameters(
    const std::vector<std::vector<std::int64_t>>& elements, int ranks);

/// All of ZeroRedundancyOptimizer but the type of optimizer. `param_groups()` are those of the
/// whole: what is set there (a learning rate, by hand or by a scheduler) counts from the next step
/// on. `state()` is empty: what this rank remembers is in `local()`.
class ShardedOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using MakeLocal = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>;

  ShardedOptimizer(const ParamGroups& param_groups,
                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, MakeLocal make,
                   const ZeroRedundancyOptions& options);
  ~ShardedOptimizer() override;

  /// All members call it alike. Hides the base's, which is not virtual: call it on this type.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Updates this rank's parameters, then all members meet to send theirs. What the closure gives,
  /// where there is one. Where updating throws on one rank, the group fails with that as its reason
  /// and the others throw too. With overlap_with_ddp backward has taken the step: does nothing.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collects the state of all members on rank `to` of the group. Every member calls it.
  void consolidate_state_dict(int to = 0);
  /// The whole optimizer as it was at the last `consolidate_state_dict`, in the form in which an
  /// undivided one saves itself; so either can load it. Throws DistError on a rank that it was not
  /// collected on. `torch::save` of this object does the same.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// What an undivided optimizer or `save` wrote, at any number of ranks: this rank's part of it is
  /// kept. Every member loads the same.
  void load(torch::serialize::InputArchive& archive) override;
  /// The same as bytes.
  std::string state_dict() const;
  void load_state_dict(const std::string& bytes);

  /// This rank's part; it belongs to this object.
  torch::optim::Optimizer& local();
  /// The rank (of the group) that keeps a parameter of this optimizer.
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

/// `Wrapped` is any class of torch::optim that treats each parameter by itself (SGD, Adam, AdamW,
/// Adagrad, RMSprop, one of yours): made from a list of parameter groups and its options. LBFGS
/// looks at all parameters together and cannot be divided. Made by all members of the group with
/// parameters of the same shapes, else throws on all. Used by one thread; the tensors must outlive
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

/// For a model whose optimizer has `overlap_with_ddp`: the averaging that `hook` does, and each
/// bucket's step as soon as it is averaged, while later buckets still travel. Backward then returns
/// with the new weights on every rank; there is nothing left for `step`. Without
/// find_unused_parameters: parameters that nobody used are updated as with zero gradients; and
/// without mixed_precision, which throws, or delayed parameters, which no hook sees. The optimizer
/// must outlive the model's use of it.
///
///   model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), optimizer));
inline CommHook hook_with_zero_step(CommHook hook, parallel::ShardedOptimizer& optimizer) {
  return parallel::hook_with_step(std::move(hook), optimizer);
}

}  // namespace muster
