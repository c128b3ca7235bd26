/// DistributedDataParallel: one copy of a module on every rank, each fed its own part of the data, all kept the same.
///
/// At construction rank 0's parameters and buffers go to all; in every backward pass the gradients are averaged, overlapped with the pass
/// itself; any optimizer then works as it does on one process. Source: torch.nn.parallel.DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/group/process_group.h"
#include "muster/parallel/comm_hook.h"

namespace muster {

struct DistributedDataParallelOptions {
  std::optional<std::vector<int>> device_ids =
      {};                                 ///< the one CUDA device of the module; absent for modules on the CPU or on several devices
  std::optional<int> output_device = {};  ///< absent: device_ids[0]
  int dim = 0;                            ///< taken for torch's sake; inputs are not divided here
  bool broadcast_buffers = true;          ///< rank 0's buffers go to all before forward
  Group process_group = nullptr;          ///< null: the default group
  double bucket_cap_mb = 25;              ///< MiB of gradients that travel together
  bool find_unused_parameters = false;    ///< forward may leave parameters out; they count as zero
  bool gradient_as_bucket_view = false;   ///< gradients alias the buckets: saves their memory and a copy
  bool static_graph = false;              ///< every iteration uses the same parameters, as often as the first
};

namespace parallel {

/// Appends the tensors inside a forward's result. For a type of your own, overload it beside that type.
inline void collect_tensors(const at::Tensor& tensor, std::vector<at::Tensor>& found) { found.push_back(tensor); }
template <class T>
requires std::is_arithmetic_v<T>
void collect_tensors(const T&, std::vector<at::Tensor>&) {}
template <class A, class B>
void collect_tensors(const std::pair<A, B>& pair, std::vector<at::Tensor>& found);
template <class... T>
void collect_tensors(const std::tuple<T...>& tuple, std::vector<at::Tensor>& found);
template <class T>
void collect_tensors(const std::optional<T>& value, std::vector<at::Tensor>& found);
template <class T>
void collect_tensors(const std::vector<T>& list, std::vector<at::Tensor>& found);
template <class T, std::size_t N>
void collect_tensors(const std::array<T, N>& list, std::vector<at::Tensor>& found);
template <class K, class T>
void collect_tensors(const std::map<K, T>& map, std::vector<at::Tensor>& found);

template <class A, class B>
void collect_tensors(const std::pair<A, B>& pair, std::vector<at::Tensor>& found) {
  collect_tensors(pair.first, found);
  collect_tensors(pair.second, found);
}
template <class... T>
void collect_tensors(const std::tuple<T...>& tuple, std::vector<at::Tensor>& found) {
  std::apply([&](const auto&... each) { (collect_tensors(each, found), ...); }, tuple);
}
template <class T>
void collect_tensors(const std::optional<T>& value, std::vector<at::Tensor>& found) {
  if (value) collect_tensors(*value, found);
}
template <class T>
void collect_tensors(const std::vector<T>& list, std::vector<at::Tensor>& found) {
  for (const auto& each : list) collect_tensors(each, found);
}
template <class T, std::size_t N>
void collect_tensors(const std::array<T, N>& list, std::vector<at::Tensor>& found) {
  for (const auto& each : list) collect_tensors(each, found);
}
template <class K, class T>
void collect_tensors(const std::map<K, T>& map, std::vector<at::Tensor>& found) {
  for (const auto& [key, each] : map) collect_tensors(each, found);
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// What is the same for every module: the state of DistributedDataParallel without the module's type.
class DataParallelCore {
 public:
  /// Collective: all members of the group, with modules of the same parameters and buffers; else throws DistError on all, naming what
  /// differs. `parameters` in registration order.
  DataParallelCore(NamedTensors parameters, NamedTensors buffers, const DistributedDataParallelOptions& options);
  ~DataParallelCore();

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);

  void set_require_sync(bool on);
  bool require_sync() const;
  void register_comm_hook(CommHook hook);
  const Group& group() const;
  std::vector<std::int64_t> bucket_bytes() const;
  bool buckets_rebuilt() const;

 private:
  struct State;
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

template <class Dict>
NamedTensors pairs(const Dict& dict) {
  NamedTensors all;
  for (const auto& item : dict) all.emplace_back(item.key(), item.value());
  return all;
}

}  // namespace parallel

/// `Module` is a torch::nn module holder (`Linear`, `Sequential`, what TORCH_MODULE makes), a shared_ptr to a module, or AnyModule; it
/// is shared, not copied. Made by all members of the group, then used alike on all. One thread at a time. Must not outlive
/// destroy_process_group in use. Neither copied nor moved: autograd knows where it stands.
///
///   DistributedDataParallel<Net> model(net);
///   auto loss = loss_of(model.forward(inputs), targets);
///   loss.backward();       // gradients are the averages of all ranks when this returns
///   optimizer.step();      // made from model.module()->parameters()
template <class Module>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(Module module, const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), core_(parameters_of(), parallel::pairs(parallel::dereference(module_).named_buffers()), options) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// The module's own forward. Its tensors are what the loss is made of; where find_unused_parameters is set, results of types that
  /// parallel::collect_tensors does not know do not compile.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    core_.before_forward();
    if constexpr (requires { module_->forward(std::forward<Arguments>(arguments)...); }) {
      return finish(module_->forward(std::forward<Arguments>(arguments)...));
    } else {
      return finish(module_.forward(std::forward<Arguments>(arguments)...));
    }
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  const Group& process_group() const { return core_.group(); }

  /// While it lives, backward adds gradients up on this rank only; the first backward pass of a forward made after it averages the sums.
  class NoSync {
   public:
    explicit NoSync(parallel::DataParallelCore& core) : core_(core), before_(core.require_sync()) { core.set_require_sync(false); }
    ~NoSync() { core_.set_require_sync(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    parallel::DataParallelCore& core_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(core_); }

  /// One hook, before the first backward pass, on all ranks.
  void register_comm_hook(CommHook hook) { core_.register_comm_hook(std::move(hook)); }
  /// Bytes of the buckets in their order; it changes once, at the forward after the first backward.
  std::vector<std::int64_t> bucket_bytes() const { return core_.bucket_bytes(); }

 private:
  parallel::NamedTensors parameters_of() { return parallel::pairs(parallel::dereference(module_).named_parameters()); }
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
