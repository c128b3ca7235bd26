/// DistributedDataParallel: one copy of a module on every rank, each fed its own part of the data,
/// all kept the same.
///
/// At construction rank 0's parameters and buffers go to all; in every backward pass the gradients
/// are averaged, overlapped with the pass itself; any optimizer then works as it does on one
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

#include "muster/group/process_group.h"
#include "muster/parallel/comm_hook.h"
#include "muster/parallel/join.h"
#include "muster/parallel/mixed_precision.h"
#include "muster/parallel/module_parts.h"
#include "muster/parallel/no_sync.h"
#include "muster/parallel/reducer.h"
#include "muster/parallel/tensor_structures.h"

namespace torch::nn {
class Module;
}

namespace muster {

struct DistributedDataParallelOptions {
  std::optional<std::vector<int>> device_ids =
      {};  ///< the one accelerator of the module; absent for modules on the CPU or on several
           ///< devices
  std::optional<int> output_device = {};  ///< absent: device_ids[0]
  int dim = 0;                            ///< taken for torch's sake; inputs are not divided here
  bool broadcast_buffers = true;          ///< rank 0's buffers go to all before forward
  bool init_sync = true;  ///< false: the modules are known to be the same; nothing is compared or
                          ///< sent at the construction
  Group process_group = nullptr;  ///< null: the default group
  double bucket_cap_mb = 25;      ///< MiB of gradients that travel together
  bool find_unused_parameters =
      false;  ///< forward may leave parameters out, and the loss outputs; they count as zero
  bool check_reduction = false;  ///< taken for torch's sake, which has deprecated it: a reduction
                                 ///< is always finished or an error
  bool gradient_as_bucket_view =
      false;                  ///< gradients alias the buckets: saves their memory and a copy
  bool static_graph = false;  ///< every iteration uses the same parameters, as often as the first
  /// Parameters whose gradients travel together, and not before `param_to_hook_all_reduce` has its
  /// own: the two go together.
  std::vector<std::pair<std::string, at::Tensor>> delay_all_reduce_named_params = {};
  at::Tensor param_to_hook_all_reduce = {};
  std::optional<MixedPrecision> mixed_precision =
      {};  ///< then gradient_as_bucket_view has no effect
};

namespace parallel {

/// What is the same for every module: the state of DistributedDataParallel without the module's
/// type.
class DataParallelCore {
 public:
  /// Collective: all members of the group, with modules of the same parameters and buffers; else
  /// throws DistError on all, naming what differs. The module is shared where a shared_ptr owns it,
  /// else it must outlive this.
  DataParallelCore(torch::nn::Module& module, const DistributedDataParallelOptions& options);
  /// The same of a module that is not C++'s.
  DataParallelCore(const ModuleParts& parts, const DistributedDataParallelOptions& options,
                   const BackwardFrame& frame);
  ~DataParallelCore();

  /// `module` is what forward will run on: the one that was wrapped, as it was then, else throws
  /// DistError. What goes wrong here on one rank ends the other ranks' calls on the model too.
  void before_forward(const torch::nn::Module& module);
  /// The same of a module that is not C++'s: its parameters as they are now, by registration, and
  /// what tells the name of one.
  void before_forward(const std::vector<at::Tensor>& parameters,
                      const std::function<std::string(std::size_t)>& name_of);
  void after_forward(const std::vector<at::Tensor>& outputs);
  /// Throws DistError where the last iteration was not finished, and ends the other ranks' waiting
  /// for it. Before what is not the model's own call: the notice of the next iteration, or the end
  /// of this rank's inputs.
  void end_iteration();
  /// Whether arguments of forward go through `changed` first.
  bool changes_arguments() const;
  at::Tensor changed(const at::Tensor& argument) const;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options);
  c10::Device join_device() const;
  Group join_process_group() const;

  void set_require_sync(bool on);
  bool require_sync() const;
  /// Whether a pass that begins now will average, if it trains anything: this thread records
  /// gradients, and outside of no_sync.
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
    return *module;  // a holder or a smart pointer
  } else if constexpr (requires { module.ptr(); }) {
    return *module.ptr();  // AnyModule
  } else {
    return module;
  }
}

}  // namespace parallel

/// `Module` is a torch::nn module holder (`Linear`, `Sequential`, what TORCH_MODULE makes), a
/// shared_ptr to a module, or AnyModule; it is shared, not copied. Made by all members of the
/// group, then used alike on all. One thread at a time. Must not outlive destroy_process_group in
/// use. Neither copied nor moved: autograd knows where it stands.
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

  /// The module's own forward. Its tensors are what the loss is made of: results of types that
  /// parallel::collect_tensors does not know do not compile. With device_ids, tensors among the
  /// arguments that lie elsewhere are copied to the device first.
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
  /// device_ids[0] where device_ids is given and no other; absent for modules on the CPU or on
  /// several devices.
  std::optional<int> output_device() const { return core_.output_device(); }

  /// While it lives, backward adds gradients up on this rank only; the first backward pass of a
  /// forward made after it averages the sums.
  using NoSync = parallel::NoSync<parallel::DataParallelCore>;
  [[nodiscard]] NoSync no_sync() { return NoSync(core_); }

  /// A Join of this model alone. A rank that has run out of inputs gives zeros to the others'
  /// averages, which are divided by all ranks or, without divide_by_initial_world_size, by those
  /// that still have inputs; at the end the last ranks' weights go to all.
  [[nodiscard]] Join join(const JoinOptions& options = {}) { return Join({this}, options); }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    return core_.join_hook(options);
  }
  c10::Device join_device() const override { return core_.join_device(); }
  Group join_process_group() const override { return core_.join_process_group(); }
  void end_of_inputs() override { core_.end_iteration(); }

  /// One hook, before the first backward pass, on all ranks.
  void register_comm_hook(CommHook hook) { core_.register_comm_hook(std::move(hook)); }
  /// At debug level DETAIL, times are logged for the first ten iterations and then for each
  /// `iterations`th; 100 at first.
  void set_runtime_logging_sample_rate(int iterations) { core_.set_sample_rate(iterations); }
  /// Bytes of the buckets in their order; it changes once, at the forward after the first backward.
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
