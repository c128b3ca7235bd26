// SPDX-License-Identifier: BSD-3-Clause
/// DistributedDataParallel: one replica of a module on every rank, each fed its own part of the
/// data, all kept equal.
///
/// Construction broadcasts rank 0's parameters and buffers. Every backward pass averages the
/// gradients, overlapped with the pass itself. Any optimizer then works as it does in a single
/// process. Source: torch.nn.parallel.DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

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

#include "muster/comm_hook.h"
#include "muster/join.h"
#include "muster/module_wrapper.h"
#include "muster/process_group.h"

namespace torch::nn {
class Module;
}

namespace muster {

struct DistributedDataParallelOptions {
  /// The module's single accelerator. Empty for modules on the CPU or on several devices.
  std::optional<std::vector<int>> device_ids = {};
  std::optional<int> output_device = {};  ///< default: device_ids[0]
  int dim = 0;                    ///< accepted for compatibility with torch; inputs are not split
  bool broadcast_buffers = true;  ///< broadcast rank 0's buffers before forward
  /// False: the modules are known to be equal; construction neither compares nor broadcasts.
  bool init_sync = true;
  Group process_group = nullptr;  ///< null: the default group
  double bucket_cap_mb = 25;      ///< MiB of gradients per bucket
  /// Forward may leave parameters unused, and outputs may be left out of the loss; their gradients
  /// count as zero.
  bool find_unused_parameters = false;
  /// Accepted for compatibility with torch (deprecated there). A reduction always finishes or
  /// throws.
  bool check_reduction = false;
  /// Gradients alias the buckets, which saves their memory and a copy.
  bool gradient_as_bucket_view = false;
  /// Every iteration uses the same parameters, each the same number of times.
  bool static_graph = false;
  /// Parameters whose gradients are reduced together, after `param_to_hook_all_reduce` has its own
  /// gradient. Set both or neither.
  std::vector<std::pair<std::string, at::Tensor>> delay_all_reduce_named_params = {};
  at::Tensor param_to_hook_all_reduce = {};
  /// If set, gradient_as_bucket_view has no effect.
  std::optional<MixedPrecision> mixed_precision = {};
};

namespace parallel {

struct BackwardFrame;  // callbacks of a language binding
struct ModuleParts;    // parameters and buffers of a module in any language

/// The part of DistributedDataParallel that does not depend on the module's type.
class DataParallelCore {
 public:
  /// Collective over the group, with modules of equal parameters and buffers; otherwise throws
  /// DistError on all members and names the difference. The module is shared if a shared_ptr owns
  /// it; otherwise it must outlive this object.
  DataParallelCore(torch::nn::Module& module, const DistributedDataParallelOptions& options);
  /// As above, for a module of another language.
  DataParallelCore(const ModuleParts& parts, const DistributedDataParallelOptions& options,
                   const BackwardFrame& frame);
  ~DataParallelCore();

  /// Called before forward. `module` must be the wrapped module with unchanged parameters;
  /// otherwise throws DistError. A failure on one rank also ends the other ranks' calls on the
  /// model.
  void before_forward(const torch::nn::Module& module);
  /// As above, for a module of another language: its current parameters in registration order, and
  /// a function that names one.
  void before_forward(const std::vector<at::Tensor>& parameters,
                      const std::function<std::string(std::size_t)>& name_of);
  void after_forward(const std::vector<at::Tensor>& outputs);
  /// Throws DistError if the last iteration was not finished, and ends the other ranks' wait for
  /// it. Called before any communication that is not the model's own: the notice of the next
  /// iteration, or the end of this rank's inputs.
  void end_iteration();
  /// Whether forward's arguments must pass through `changed`.
  bool changes_arguments() const;
  at::Tensor changed(const at::Tensor& argument) const;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options);
  c10::Device join_device() const;
  Group join_process_group() const;

  void set_require_sync(bool on);
  bool require_sync() const;
  /// Whether a backward pass that begins now averages gradients: this thread records gradients and
  /// is outside no_sync.
  bool syncs() const;
  void register_comm_hook(CommHook hook);
  void set_sample_rate(int iterations);
  const Group& group() const;
  std::optional<int> output_device() const;
  std::vector<std::int64_t> bucket_bytes() const;
  bool buckets_rebuilt() const;

 private:
  struct State;
  class Shadow;
  template <class Check>
  void begin_forward(Check check_unchanged);
  std::unique_ptr<State> state_;
};

template <class Module>
auto& dereference(Module& module) {
  if constexpr (requires { module->named_parameters(); }) {
    return *module;  // a module holder or a smart pointer
  } else if constexpr (requires { module.ptr(); }) {
    return *module.ptr();  // AnyModule
  } else {
    return module;
  }
}

}  // namespace parallel

/// `Module` is a torch::nn module holder (`Linear`, `Sequential`, any TORCH_MODULE type), a
/// shared_ptr to a module, or AnyModule; it is shared, not copied. All members of the group
/// construct it and then use it alike. Not thread-safe. Must not be used after
/// destroy_process_group. Neither copyable nor movable, because autograd holds its address.
///
///   DistributedDataParallel<Net> model(net);
///   auto loss = loss_of(model.forward(inputs), targets);
///   loss.backward();       // gradients are the averages of all ranks when this returns
///   optimizer.step();      // made from model.module()->parameters()
template <class Module>
class DistributedDataParallel final : public Joinable {
 public:
  explicit DistributedDataParallel(Module module,
                                   const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), core_(parallel::dereference(module_), options) {}

  /// Runs the module's forward. Compute the loss from the tensors it returns; result types unknown
  /// to parallel::collect_tensors do not compile. With device_ids, tensor arguments on other
  /// devices are first copied to that device.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    if (takes_part_in_join() && core_.syncs()) core_.end_iteration();
    Join::notify_join_context(*this);
    core_.before_forward(parallel::dereference(module_));
    if (!core_.changes_arguments()) return finish(call(std::forward<Arguments>(arguments)...));
    std::tuple<Changed<Arguments>...> changed(std::forward<Arguments>(arguments)...);
    return std::apply(
        [this](auto&... each) {
          (parallel::replace_tensors(
               each, [this](const at::Tensor& argument) { return core_.changed(argument); }),
           ...);
          return finish(call(static_cast<Arguments&&>(each)...));
        },
        changed);
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  const Group& process_group() const { return core_.group(); }
  /// The output_device option, or device_ids[0]; empty for modules on the CPU or on several
  /// devices.
  std::optional<int> output_device() const { return core_.output_device(); }

  /// While the returned object lives, backward accumulates gradients on this rank only. The first
  /// backward pass of a forward made after it averages the sums.
  using NoSync = parallel::NoSync<parallel::DataParallelCore>;
  [[nodiscard]] NoSync no_sync() { return NoSync(core_); }

  /// A Join of this model alone. A rank that has run out of inputs contributes zeros to the other
  /// ranks' averages, which are divided by the number of all ranks or, without
  /// divide_by_initial_world_size, of those that still have inputs. At the end the weights of the
  /// last ranks are broadcast.
  [[nodiscard]] Join join(const JoinOptions& options = {}) { return Join({this}, options); }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    return core_.join_hook(options);
  }
  c10::Device join_device() const override { return core_.join_device(); }
  Group join_process_group() const override { return core_.join_process_group(); }
  void end_of_inputs() override { core_.end_iteration(); }

  /// Sets the communication hook. Call it once, before the first backward pass, on all ranks.
  void register_comm_hook(CommHook hook) { core_.register_comm_hook(std::move(hook)); }
  /// At debug level DETAIL, timings are logged for the first 10 iterations and then for every
  /// `iterations`-th; initially 100.
  void set_runtime_logging_sample_rate(int iterations) { core_.set_sample_rate(iterations); }
  /// Bucket sizes in bytes, in order. They change once, at the forward after the first backward.
  std::vector<std::int64_t> bucket_bytes() const { return core_.bucket_bytes(); }

 private:
  template <class T>
  using Changed = std::conditional_t<parallel::holds_tensors<std::remove_cvref_t<T>>,
                                     std::remove_cvref_t<T>, T&&>;

  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    if constexpr (requires { module_->forward(std::forward<Arguments>(arguments)...); }) {
      return module_->forward(std::forward<Arguments>(arguments)...);
    } else {
      return module_.forward(std::forward<Arguments>(arguments)...);
    }
  }
  template <class Output>
  Output finish(Output output) {
    std::vector<at::Tensor> tensors;
    using parallel::collect_tensors;
    collect_tensors(output, tensors);
    core_.after_forward(tensors);
    return output;
  }

  Module module_;
  parallel::DataParallelCore core_;
};

}  // namespace muster
