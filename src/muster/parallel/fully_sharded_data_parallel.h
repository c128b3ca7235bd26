/// FullyShardedDataParallel: one model on all ranks, each fed its own part of the data, of which
/// every rank keeps only a share: of the parameters, of their gradients, and so of what the
/// optimizer keeps.
///
/// A model is divided into units. A unit's parameters are gathered when its forward begins and
/// given back when it ends, gathered once more for its part of backward, and given back with the
/// gradients, of which each rank keeps the averages of its shard. So a rank holds one unit whole at
/// a time, and 1/n of all else. Source: torch.distributed.fsdp.
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

#include "muster/group/process_group.h"
#include "muster/parallel/mixed_precision.h"
#include "muster/parallel/no_sync.h"
#include "muster/parallel/tensor_structures.h"

namespace muster {

/// Whether an element of a torch::nn::Sequential, with so many parameters that are in no unit yet,
/// becomes a unit.
using AutoWrapPolicy =
    std::function<bool(const torch::nn::Module& module, std::int64_t parameters)>;

/// Elements with at least so many parameters. Source:
/// torch.distributed.fsdp.wrap.size_based_auto_wrap_policy.
AutoWrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params = 100'000'000);
/// Elements of these types: `module_wrap_policy<BlockImpl>()`. Source:
/// torch.distributed.fsdp.wrap.ModuleWrapPolicy.
template <class... Modules>
AutoWrapPolicy module_wrap_policy() {
  return [](const torch::nn::Module& module, std::int64_t) {
    return ((dynamic_cast<const Modules*>(&module) != nullptr) || ...);
  };
}

enum class ShardingStrategy {
  FULL_SHARD,     ///< whole parameters are given back between forward and backward
  SHARD_GRAD_OP,  ///< they stay until backward: one all_gather less, and the memory of all of them
};

struct FullyShardedDataParallelOptions {
  Group process_group = nullptr;  ///< the ranks that share the model; null: the default group
  /// Which elements of Sequentials inside the module become units of their own; their forward takes
  /// and gives one tensor. Absent: none.
  AutoWrapPolicy auto_wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::FULL_SHARD;
  std::optional<MixedPrecision> mixed_precision =
      {};  ///< keep_low_precision_grads: not here, gradients are in the shards' type
  bool sync_module_states =
      true;  ///< rank 0's values go to all first; false: each rank keeps its shard of its own
};

/// Tensors by their names, in the order of registration.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

namespace parallel {

class ShardedUnit;

/// What is the same for every module.
class ShardedCore {
 public:
  ShardedCore(torch::nn::Module& module, const FullyShardedDataParallelOptions& options);
  ~ShardedCore();

  /// `inputs`: the tensors among forward's arguments; returns what comes in their place.
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

/// `forward(arguments...)` between the core's two halves; tensors among the arguments are what
/// before_forward() makes of them.
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

/// `Module` is a holder (`Linear`, `Sequential`, what TORCH_MODULE makes) or a shared_ptr to a
/// module. The module's parameters stay the tensors that they are, under their names; between
/// passes each holds, in one dimension, the elements of it that lie on this rank. An optimizer made
/// from them after this works on those. Copies are the same unit.
///
///   FullyShardedDataParallel<Net> model(net, {.auto_wrap_policy =
///       module_wrap_policy<BlockImpl>()});
///   torch::optim::Adam optimizer(net->parameters());
///   // gradients are this rank's shards of the averages
///   loss_of(model(inputs), targets).backward();
///   optimizer.step();
///
/// Units inside a module of one's own are members of it, which wrap what it registers:
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() : in(register_module("in", torch::nn::Linear(8, 8))), unit(in) {}
///     at::Tensor forward(at::Tensor x) { return unit(x); }
///     torch::nn::Linear in;
///     muster::FullyShardedDataParallel<torch::nn::Linear> unit;
///   };
///
/// Made by all members of the group, then used alike on all: construction, forward and backward are
/// collective. One thread at a time. Throws DistError on all members where their modules differ; a
/// backward pass that fails on one rank fails on all.
template <class Module>
class FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(Module module,
                                    const FullyShardedDataParallelOptions& options = {})
      : module_(std::move(module)),
        core_(std::make_shared<parallel::ShardedCore>(*module_, options)) {}
  /// None yet.
  FullyShardedDataParallel(std::nullptr_t) : module_(nullptr) {}

  /// The module's own forward, on its whole parameters. Its tensors are what the loss is made of.
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
  /// This one and those inside.
  std::size_t units() const { return core_->units(); }
  /// Bytes that whole parameters take on this rank now, of this unit and those inside.
  std::int64_t unsharded_bytes() const { return core_->unsharded_bytes(); }

  /// While it lives, backward adds whole gradients up on this rank; the first backward pass after
  /// it averages the sums. That takes the memory of all gradients; drop_gradients() forgets them.
  using NoSync = parallel::NoSync<parallel::ShardedCore>;
  [[nodiscard]] NoSync no_sync() { return NoSync(*core_); }
  /// Forgets what backward has added up inside of no_sync(), which zero_grad() of an optimizer does
  /// not reach.
  void drop_gradients() { core_->drop_gradients(); }

  /// While it lives, the module's parameters are whole on every rank: to look at, or to
  /// torch::save. `writeback`: what has been changed in them on this rank counts for its shard.
  /// Collective.
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

  /// Collective: whole parameters and buffers by name, on the CPU, on rank 0; with rank0_only off
  /// on every rank, else empty on the others.
  StateDict state_dict(bool rank0_only = true) { return core_->state_dict(rank0_only); }
  /// This rank's shards, and the buffers: views of what the model has. For a job of the same number
  /// of ranks.
  StateDict sharded_state_dict() { return core_->sharded_state_dict(); }
  /// Each rank takes its shards of whole values, which it is given on every rank. Names and sizes
  /// must be the module's.
  void load_state_dict(const StateDict& state) { core_->load_state_dict(state); }
  void load_sharded_state_dict(const StateDict& state) { core_->load_sharded_state_dict(state); }

  /// Collective: the norm of all gradients over all ranks, which are multiplied so that it is at
  /// most `max_norm`. torch's own function sees only one rank's shards, and scales every rank's by
  /// another factor.
  double clip_grad_norm_(double max_norm, double norm_type = 2) {
    return core_->clip_grad_norm(max_norm, norm_type);
  }

 private:
  Module module_;
  std::shared_ptr<parallel::ShardedCore> core_;
};

/// The same in a word.
template <class Module>
FullyShardedDataParallel<Module> fully_shard(Module module,
                                             const FullyShardedDataParallelOptions& options = {}) {
  return FullyShardedDataParallel<Module>(std::move(module), options);
}

}  // namespace muster
