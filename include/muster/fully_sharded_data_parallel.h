// SPDX-License-Identifier: BSD-3-Clause
/// FullyShardedDataParallel: data-parallel training in which every rank stores only its shard of
/// the parameters, the gradients and the optimizer state.
///
/// A model is divided into units. A unit's parameters are all-gathered when its forward begins and
/// freed when it ends, then gathered again for its part of backward and freed after it. Each rank
/// keeps its shard of the averaged gradients. A rank thus holds one whole unit at a time, and 1/n
/// of everything else. Each parameter is divided by itself along its first dimension, so that
/// shards have as many dimensions as the whole. Source: torch.distributed.fsdp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/collectives.h"
#include "muster/device_mesh.h"
#include "muster/module_wrapper.h"
#include "muster/process_group.h"

namespace muster {

/// Decides whether a module becomes a unit: an element of a torch::nn::Sequential, or a module that
/// is called through a `Shardable`. `parameters` is the number of its parameter elements that are
/// in no unit yet.
using AutoWrapPolicy =
    std::function<bool(const torch::nn::Module& module, std::int64_t parameters)>;

/// Selects elements with at least `min_num_params` parameters. Source:
/// torch.distributed.fsdp.wrap.size_based_auto_wrap_policy.
AutoWrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params = 100'000'000);
/// Selects elements of these types: `module_wrap_policy<BlockImpl>()`. Source:
/// torch.distributed.fsdp.wrap.ModuleWrapPolicy.
template <class... Modules>
AutoWrapPolicy module_wrap_policy() {
  return [](const torch::nn::Module& module, std::int64_t) {
    return ((dynamic_cast<const Modules*>(&module) != nullptr) || ...);
  };
}

/// When backward begins to gather the next unit. Source: torch.distributed.fsdp.BackwardPrefetch.
enum class BackwardPrefetch {
  BACKWARD_PRE,   ///< before the current unit's computation: overlaps most, holds two units whole
  BACKWARD_POST,  ///< after it, before its gradients are reduced
};

namespace parallel {
class ShardedTimeline;
}

/// Source: torch.distributed.fsdp.ShardingStrategy.
enum class ShardingStrategy {
  /// Free whole parameters between forward and backward.
  FULL_SHARD,
  /// Keep them until backward: saves one all_gather and takes the memory of all parameters.
  SHARD_GRAD_OP,
  /// Every rank stores everything; gradients are averaged at the end of each unit's backward.
  NO_SHARD,
  /// FULL_SHARD among the ranks of `process_group`; the ranks of `replicate_group` hold the same
  /// shard.
  HYBRID_SHARD,
  /// The same with SHARD_GRAD_OP (torch: _HYBRID_SHARD_ZERO2).
  HYBRID_SHARD_ZERO2,
};

struct FullyShardedDataParallelOptions {
  Group process_group = nullptr;  ///< the ranks that shard the model; null: the default group
  /// Selects the inner modules that become units. Selected elements of a Sequential must take and
  /// return one tensor. Default: none.
  AutoWrapPolicy auto_wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::FULL_SHARD;
  /// keep_low_precision_grads is not supported: gradients have the shards' dtype.
  std::optional<MixedPrecision> mixed_precision = {};
  /// True: broadcast rank 0's values first. False: each rank keeps the shard of its own values.
  bool sync_module_states = true;
  /// The ranks that hold the same shard as this one; for the hybrid strategies.
  Group replicate_group = nullptr;
  /// Replaces the two groups. A mesh of one dimension, or of two for the hybrid strategies: the
  /// first replicates and the second shards.
  std::optional<DeviceMesh> device_mesh = {};
  /// For the strategies that free parameters: between forward and backward, each group of this many
  /// consecutive ranks together keeps the whole parameters and gathers them for backward. Must
  /// divide the size of the group that shards. 1: as SHARD_GRAD_OP; the whole size: as FULL_SHARD.
  std::optional<int> reshard_after_forward = {};
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::BACKWARD_PRE;
  /// In forward, begin to gather the unit that followed in the last pass. All passes must call the
  /// units in one order.
  bool forward_prefetch = false;
  /// How gradients travel when they are averaged, and parameters when a pass gathers them: all
  /// ranks then compute with the same rounded parameters. Shards are never rounded, and neither are
  /// state_dict() and summon_full_params(). For parameters of float32, float16 and bfloat16.
  Compression gradient_compression = Compression::none;
  Compression parameter_compression = Compression::none;
  /// Shards and gradients, and therefore the optimizer's state, stay on the CPU. Whole parameters
  /// are on the module's device, or on `device`.
  bool cpu_offload = false;
  std::optional<at::Device> device = {};  ///< default: the parameters' own; not for buffers
  /// Stay whole on every rank: not sharded, not averaged, and not converted in state dicts.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};
  std::vector<at::Tensor> ignored_states = {};  ///< parameters and buffers
  /// Initialises the parameters and buffers of one module, without its submodules. Called for each
  /// module that has some on the meta device, after they have got memory (on `device`, default:
  /// CPU). Units are processed one after the other, so no rank ever holds the whole model. Without
  /// it, only the shards get memory: parameters, and buffers of floating-point types, are NaN until
  /// they are set or loaded, and other buffers 0.
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  /// The dimension along which a parameter is divided; nothing, and the default: the first.
  std::function<std::optional<std::int64_t>(const at::Tensor& parameter)> shard_placement_fn = {};
  std::shared_ptr<parallel::ShardedTimeline> timeline = {};  ///< records what units do
};

/// Named tensors in registration order.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

namespace parallel {

class ShardedUnit;
class SharedPass;

/// Bytes on this rank.
struct ShardedMemory {
  std::int64_t parameters = 0, gradients = 0;
  /// Whole parameters in all models of the group: now, and the peak since reset_peak_memory().
  std::int64_t gathered = 0, gathered_peak = 0;
  std::int64_t staging_peak = 0;  ///< same, of whole gradients and buffers while they are reduced
};

/// The part of FullyShardedDataParallel that does not depend on the module's type.
class ShardedCore {
 public:
  ShardedCore(torch::nn::Module& module, const FullyShardedDataParallelOptions& options);
  /// The core of module number `member` in a unit of several.
  ShardedCore(torch::nn::Module& module, std::shared_ptr<ShardedUnit> unit,
              std::shared_ptr<SharedPass> pass, std::size_t member);
  ~ShardedCore();

  /// `inputs` are the tensors among forward's arguments. Returns their replacements.
  std::vector<at::Tensor> before_forward(std::vector<at::Tensor> inputs);
  void after_forward(const std::vector<at::Tensor>& outputs);
  void leave_forward() noexcept;

  void set_require_sync(bool on);
  bool require_sync() const;
  void drop_gradients();
  void summon();
  void end_summon(bool writeback) noexcept;
  StateDict state_dict(bool rank0_only);
  StateDict sharded_state_dict();
  void load_state_dict(const StateDict& state);
  void load_sharded_state_dict(const StateDict& state);
  double clip_grad_norm(double max_norm, double norm_type);
  const Group& group() const;
  std::size_t units() const;
  std::int64_t unsharded_bytes() const;
  ShardedMemory memory() const;
  void reset_peak_memory();
  void unshard(bool async_op);
  void reshard();
  ShardedUnit& unit();
  std::vector<ShardedUnit*> all_units() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Marks a module as called through a Shardable, and holds its unit, if it is one.
struct ShardableModule {
  virtual ~ShardableModule() = default;
  std::shared_ptr<ShardedCore> core;
};
template <class Impl>
struct ShardableImpl final : Impl, ShardableModule {
  using Impl::Impl;
};

template <class T>
using HeldArgument =
    std::conditional_t<holds_tensors<std::remove_cvref_t<T>>, std::remove_cvref_t<T>, T&&>;

/// Calls `forward(arguments...)` between the core's before_forward() and after_forward(), with the
/// tensor arguments replaced by before_forward().
template <class Forward, class... Arguments>
auto through_unit(ShardedCore& core, const Forward& forward, Arguments&&... arguments) {
  std::tuple<HeldArgument<Arguments>...> held(std::forward<Arguments>(arguments)...);
  const auto each_tensor = [&held](const TensorMap& visit) {
    std::apply([&visit](auto&... each) { (replace_tensors(each, visit), ...); }, held);
  };
  std::vector<at::Tensor> inputs;
  each_tensor([&inputs](const at::Tensor& each) { return inputs.emplace_back(each); });
  inputs = core.before_forward(std::move(inputs));
  auto next = inputs.begin();
  each_tensor([&next](const at::Tensor&) { return *next++; });
  auto output = [&] {
    try {
      return std::apply(
          [&forward](auto&... each) { return forward(static_cast<Arguments&&>(each)...); }, held);
    } catch (...) {
      core.leave_forward();
      throw;
    }
  }();
  std::vector<at::Tensor> outputs;
  collect_tensors(output, outputs);
  core.after_forward(outputs);
  return output;
}

}  // namespace parallel

/// A module holder like those of TORCH_MODULE, whose module an auto_wrap_policy may select at any
/// place in a model, whatever its forward takes and returns. Call it, `block(x, mask)`; calling
/// `block->forward()` does not gather. A clone() of the module cannot be selected.
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() { register_module("block", block); }
///     at::Tensor forward(at::Tensor x) { return block(x, 3); }
///     muster::Shardable<BlockImpl> block{8};
///   };
template <class Impl>
class Shardable : public torch::nn::ModuleHolder<Impl> {
 public:
  template <class... Arguments>
  requires std::is_constructible_v<Impl, Arguments...>
  explicit Shardable(Arguments&&... arguments)
      : torch::nn::ModuleHolder<Impl>(
            std::shared_ptr<Impl>(std::make_shared<parallel::ShardableImpl<Impl>>(
                std::forward<Arguments>(arguments)...))) {}
  Shardable(std::nullptr_t) : torch::nn::ModuleHolder<Impl>(nullptr) {}
  Shardable(std::shared_ptr<Impl> module) : torch::nn::ModuleHolder<Impl>(std::move(module)) {}

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const auto inner = [this](auto&&... each) {
      return this->get()->forward(std::forward<decltype(each)>(each)...);
    };
    auto* const marked = dynamic_cast<parallel::ShardableModule*>(this->get());
    if (marked == nullptr || !marked->core) return inner(std::forward<Arguments>(arguments)...);
    return parallel::through_unit(*marked->core, inner, std::forward<Arguments>(arguments)...);
  }
};

/// `Module` is a module holder (`Linear`, `Sequential`, any TORCH_MODULE type) or a shared_ptr to a
/// module. The module's parameters remain the same tensors under the same names. Between passes
/// each parameter holds the rows stored on this rank, possibly none, in ranks' order as torch.chunk
/// divides; an optimizer constructed from them afterwards works on those. Copies refer to the same
/// unit.
///
///   FullyShardedDataParallel<Net> model(net, {.auto_wrap_policy =
///       module_wrap_policy<BlockImpl>()});
///   torch::optim::Adam optimizer(net->parameters());
///   // gradients are this rank's shards of the averages
///   loss_of(model(inputs), targets).backward();
///   optimizer.step();
///
/// A module may declare units itself, as members that wrap its registered submodules:
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() : in(register_module("in", torch::nn::Linear(8, 8))), unit(in) {}
///     at::Tensor forward(at::Tensor x) { return unit(x); }
///     torch::nn::Linear in;
///     muster::FullyShardedDataParallel<torch::nn::Linear> unit;
///   };
///
/// All members of the group construct it and then use it alike: construction, forward and backward
/// are collective. Not thread-safe. Throws DistError on all members if their modules differ, or if
/// a parameter is a scalar, which has no rows; a backward pass that fails on one rank fails on all.
template <class Module>
class FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(Module module,
                                    const FullyShardedDataParallelOptions& options = {})
      : module_(std::move(module)),
        core_(std::make_shared<parallel::ShardedCore>(*module_, options)) {}
  /// Empty; assign a unit before use.
  FullyShardedDataParallel(std::nullptr_t) : module_(nullptr) {}

  /// Runs the module's forward on its whole parameters. Compute the loss from the tensors it
  /// returns.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    const auto inner = [this](auto&&... each) {
      return module_->forward(std::forward<decltype(each)>(each)...);
    };
    return parallel::through_unit(*core_, inner, std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  const Group& process_group() const { return core_->group(); }
  /// Number of units: this one and those inside it.
  std::size_t units() const { return core_->units(); }
  /// Bytes of whole parameters on this rank now, in this unit and those inside it.
  std::int64_t unsharded_bytes() const { return core_->unsharded_bytes(); }
  using Memory = parallel::ShardedMemory;
  Memory memory() const { return core_->memory(); }
  void reset_peak_memory() { core_->reset_peak_memory(); }

  /// Collective. Gathers the parameters of this unit, without inner units, until reshard() or the
  /// end of the next forward pass. With `async_op`, they are there when `wait()` of the result or
  /// the next forward begins to compute; the result may be dropped.
  struct UnshardHandle {
    std::shared_ptr<parallel::ShardedCore> core;
    void wait() {
      if (core) core->unshard(false);
      core = nullptr;
    }
  };
  UnshardHandle unshard(bool async_op = false) {
    core_->unshard(async_op);
    return {async_op ? core_ : nullptr};
  }
  void reshard() { core_->reshard(); }
  /// The unit itself, for its settings.
  parallel::ShardedUnit& unit() { return core_->unit(); }
  /// This one and those inside it, outer ones first.
  std::vector<parallel::ShardedUnit*> unit_list() const { return core_->all_units(); }

  /// While the returned object lives, backward accumulates unsharded gradients on this rank. The
  /// first backward pass after it averages the sums. This takes the memory of all gradients;
  /// drop_gradients() discards them.
  using NoSync = parallel::NoSync<parallel::ShardedCore>;
  [[nodiscard]] NoSync no_sync() { return NoSync(*core_); }
  /// Discards gradients accumulated inside no_sync(), which an optimizer's zero_grad() does not
  /// reach.
  void drop_gradients() { core_->drop_gradients(); }

  /// While the object lives, the module's parameters are whole on every rank, for reading or
  /// torch::save. `writeback` keeps this rank's changes to its own shard. Collective.
  class FullParams {
   public:
    FullParams(parallel::ShardedCore& core, bool writeback) : core_(core), writeback_(writeback) {
      core.summon();
    }
    ~FullParams() { core_.end_summon(writeback_); }
    FullParams(const FullParams&) = delete;
    FullParams& operator=(const FullParams&) = delete;

   private:
    parallel::ShardedCore& core_;
    bool writeback_;
  };
  [[nodiscard]] FullParams summon_full_params(bool writeback = true) {
    return FullParams(*core_, writeback);
  }

  /// Collective. Returns whole parameters and buffers by name, on the CPU: on rank 0 only and empty
  /// elsewhere, or on every rank if `rank0_only` is false.
  StateDict state_dict(bool rank0_only = true) { return core_->state_dict(rank0_only); }
  /// This rank's shards and buffers, as views of the model's. Can be loaded only with the same
  /// number of ranks.
  StateDict sharded_state_dict() { return core_->sharded_state_dict(); }
  /// Each rank takes its shards from whole values, given on every rank. Names and sizes must match
  /// the module's.
  void load_state_dict(const StateDict& state) { core_->load_state_dict(state); }
  void load_sharded_state_dict(const StateDict& state) { core_->load_sharded_state_dict(state); }

  /// Collective. Computes the norm of all gradients over all ranks and scales them so that it is at
  /// most `max_norm`. Returns the norm before scaling, the same bit for bit on all ranks. torch's
  /// own function sees only one rank's shards and would scale each rank differently; to clip other
  /// tensors too, pass ShardedTensors to muster's clip_grad_norm_().
  double clip_grad_norm_(double max_norm, double norm_type = 2) {
    return core_->clip_grad_norm(max_norm, norm_type);
  }

 private:
  Module module_;
  std::shared_ptr<parallel::ShardedCore> core_;
};

/// This rank's rows of a parameter of a FullyShardedDataParallel, and what they are rows of: over
/// the group that shares the parameters and, in hybrid sharding, before it that of the replicas.
/// `like(parameter.grad())` is the gradient. None for a tensor that is no such parameter. Throws
/// DistError while the parameter is whole.
std::optional<ShardedTensor> sharded_tensor(const at::Tensor& parameter);

/// Shorthand for the constructor.
template <class Module>
FullyShardedDataParallel<Module> fully_shard(Module module,
                                             const FullyShardedDataParallelOptions& options = {}) {
  return FullyShardedDataParallel<Module>(std::move(module), options);
}
/// Makes one unit of several modules of a model, each called through a `Shardable`: those that
/// share a parameter, such as an embedding and the layer that scores words by its weight. Shard the
/// model around them afterwards. The unit's parameters are whole from the first of these modules'
/// forward until each has run. Throws DistError for a module that is not in a Shardable.
void fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                 const FullyShardedDataParallelOptions& options = {});

}  // namespace muster
