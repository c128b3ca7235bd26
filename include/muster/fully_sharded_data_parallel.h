/// FullyShardedDataParallel: data-parallel training in which every rank stores only its shard of
/// the parameters, the gradients and the optimizer state.
///
/// A model is divided into units. A unit's parameters are all-gathered when its forward begins and
/// freed when it ends, then gathered again for its part of backward and freed after it; of the
/// averaged gradients each rank keeps its shard. A rank thus holds one whole unit at a time, and
/// 1/n of everything else. Source: torch.distributed.fsdp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

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

#include "muster/module_wrapper.h"
#include "muster/process_group.h"

namespace muster {

/// Decides whether an element of a torch::nn::Sequential becomes a unit. `parameters` is the number
/// of its parameter elements that are in no unit yet.
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

enum class ShardingStrategy {
  /// Free whole parameters between forward and backward.
  /// Keep them until backward: saves one all_gather and takes the memory of all parameters.
  FULL_SHARD,
  SHARD_GRAD_OP,
};

struct FullyShardedDataParallelOptions {
  Group process_group = nullptr;  ///< the ranks that shard the model; null: the default group
  /// Selects the elements of Sequentials inside the module that become units; their forward takes
  /// and returns one tensor. Default: none.
  AutoWrapPolicy auto_wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::FULL_SHARD;
  /// keep_low_precision_grads is not supported: gradients have the shards' dtype.
  std::optional<MixedPrecision> mixed_precision = {};
  /// True: broadcast rank 0's values first. False: each rank keeps the shard of its own values.
  bool sync_module_states = true;
};

/// Named tensors in registration order.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

namespace parallel {

class ShardedUnit;

/// The part of FullyShardedDataParallel that does not depend on the module's type.
class ShardedCore {
 public:
  ShardedCore(torch::nn::Module& module, const FullyShardedDataParallelOptions& options);
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

 private:
  struct State;
  std::unique_ptr<State> state_;
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

/// `Module` is a module holder (`Linear`, `Sequential`, any TORCH_MODULE type) or a shared_ptr to a
/// module. The module's parameters remain the same tensors under the same names. Between passes
/// each parameter is one-dimensional and holds the elements stored on this rank; an optimizer
/// constructed from them afterwards works on those. Copies refer to the same unit.
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
/// are collective. Not thread-safe. Throws DistError on all members if their modules differ; a
/// backward pass that fails on one rank fails on all.
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
  /// most `max_norm`. Returns the norm before scaling. torch's own function sees only one rank's
  /// shards and would scale each rank differently.
  double clip_grad_norm_(double max_norm, double norm_type = 2) {
    return core_->clip_grad_norm(max_norm, norm_type);
  }

 private:
  Module module_;
  std::shared_ptr<parallel::ShardedCore> core_;
};

/// Shorthand for the constructor.
template <class Module>
FullyShardedDataParallel<Module> fully_shard(Module module,
                                             const FullyShardedDataParallelOptions& options = {}) {
  return FullyShardedDataParallel<Module>(std::move(module), options);
}

}  // namespace muster
