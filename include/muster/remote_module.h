// SPDX-License-Identifier: BSD-3-Clause
/// A torch::nn module on another worker: torch.distributed.nn.RemoteModule.
///
///     // on every worker: how to construct it
///     rpc::register_remote_module<EncoderImpl, int, int>("encoder");
///     rpc::RemoteModule<EncoderImpl> encoder("worker1/cpu", "encoder", 64, 32);
///     // or forward_async
///     at::Tensor out = encoder.forward(input);
///     DistributedOptimizer<torch::optim::SGD> optimizer(encoder.remote_parameters(),
///         torch::optim::SGDOptions(0.1));
///
/// In a distributed autograd context, gradients flow through it. forward takes the arguments of the
/// module's forward. "worker1" alone means its CPU. On a CUDA device, the module and its inputs are
/// moved there, and outputs return by the device maps, or to the CPU if no map applies. Requires
/// init_rpc. The module lives as long as a RemoteModule or an RRef to it.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/rref.h"

namespace muster::rpc {

/// On its worker: the module, and its device.
template <class Module>
struct ModuleHere {
  std::shared_ptr<Module> module;
  at::Device device = at::kCPU;
  Module* operator->() const { return module.get(); }
};

namespace detail {

/// Parses "worker1/cuda:0". Throws DistError if the text is malformed.
std::pair<std::string, at::Device> parse_remote_device(const std::string& text);

inline std::string maker_of(const std::string& name) { return "muster::module::" + name; }
inline std::string forward_of(const std::string& name) { return maker_of(name) + "::forward"; }
inline std::string parameters_of(const std::string& name) {
  return maker_of(name) + "::parameters";
}
std::vector<RRef<at::Tensor>> parameter_rrefs(const torch::nn::Module& module, bool recurse);

template <class T>
T on_device(T value, const at::Device& device) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.defined() ? value.to(device) : value;
  } else {
    return value;
  }
}

template <class Module, class Forward>
struct ForwardOf;
template <class Module, class R, class C, class... A>
struct ForwardOf<Module, R (C::*)(A...)> {
  using Result = std::remove_cvref_t<R>;
  static void enable(const std::string& name) {
    register_function(forward_of(name),
                      [](const RRef<ModuleHere<Module>>& held, Carried<A>... arguments) -> Result {
                        ModuleHere<Module>& here = held.local_value();
                        if (here.device.is_cpu())
                          return here.module->forward(std::move(arguments)...);
                        return on_device<Result>(here.module->forward(on_device<Carried<A>>(
                                                     std::move(arguments), here.device)...),
                                                 at::kCPU);
                      });
  }
};
template <class Module, class R, class C, class... A>
struct ForwardOf<Module, R (C::*)(A...) const> : ForwardOf<Module, R (C::*)(A...)> {};

template <class Module>
using Forward = ForwardOf<Module, decltype(&Module::forward)>;

}  // namespace detail

/// Registers a module class; call it on every worker that is to hold such modules. `Module` is an
/// Impl class with one forward; `Arguments` are the parameter types of the constructor to use.
template <class Module, class... Arguments>
void register_remote_module(const std::string& name) {
  register_function(detail::maker_of(name), [](const std::string& device, Arguments... arguments) {
    ModuleHere<Module> here{std::make_shared<Module>(std::move(arguments)...), at::Device(device)};
    if (!here.device.is_cpu()) here.module->to(here.device);
    return here;
  });
  detail::Forward<Module>::enable(name);
  register_function(detail::parameters_of(name),
                    [](const RRef<ModuleHere<Module>>& held, bool recurse) {
                      return detail::parameter_rrefs(*held.local_value().module, recurse);
                    });
  register_function(detail::maker_of(name) + "::ready",
                    [](const RRef<ModuleHere<Module>>& held) { held.local_value(); });
}

template <class Module>
class RemoteModule {
 public:
  using Result = typename detail::Forward<Module>::Result;

  /// Constructs the module on the given worker and device, and waits for it; throws what its
  /// constructor threw.
  template <class... Arguments>
  RemoteModule(const std::string& remote_device, std::string name, const Arguments&... arguments)
      : name_(std::move(name)) {
    const auto [worker, device] = detail::parse_remote_device(remote_device);
    module_ =
        remote<ModuleHere<Module>>(To(worker), detail::maker_of(name_), device.str(), arguments...);
    module_.rpc_sync().call(detail::maker_of(name_) + "::ready");
  }

  template <class... Arguments>
  Result forward(const Arguments&... arguments) const {
    return module_.rpc_sync().template call<Result>(detail::forward_of(name_), arguments...);
  }
  template <class... Arguments>
  Future<Result> forward_async(const Arguments&... arguments) const {
    return module_.rpc_async().template call<Result>(detail::forward_of(name_), arguments...);
  }
  /// The output stays on the module's worker, to be passed to a worker that needs it.
  template <class... Arguments>
  RRef<Result> forward_rref(const Arguments&... arguments) const {
    return module_.remote().template call<Result>(detail::forward_of(name_), arguments...);
  }
  /// The module's parameters, with `recurse` those of submodules too, in the order of
  /// Module::parameters().
  std::vector<RRef<at::Tensor>> remote_parameters(bool recurse = true) const {
    return module_.rpc_sync().template call<std::vector<RRef<at::Tensor>>>(
        detail::parameters_of(name_), recurse);
  }
  const RRef<ModuleHere<Module>>& get_module_rref() const { return module_; }

 private:
  std::string name_;
  RRef<ModuleHere<Module>> module_;
};

}  // namespace muster::rpc
