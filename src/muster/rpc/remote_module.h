/// A torch::nn module that lives on another worker: torch.distributed.nn.RemoteModule.
///
///     // everywhere: how it is made of its arguments
///     rpc::register_remote_module<EncoderImpl, int, int>("encoder");
///     rpc::RemoteModule<EncoderImpl> encoder("worker1/cpu", "encoder", 64, 32);
///     // or forward_async
///     at::Tensor out = encoder.forward(input);
///     DistributedOptimizer<torch::optim::SGD> optimizer(encoder.remote_parameters(),
///         torch::optim::SGDOptions(0.1));
///
/// In a context of distributed autograd gradients flow through it. forward takes what the module's
/// own forward takes. "worker1" alone means its cpu; a CUDA device moves the module there, inputs
/// are moved to it, and outputs come back as device maps say (to the CPU where they go by none).
/// Without init_rpc there is none. The module lives as long as a RemoteModule or an RRef to it
/// does.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/rpc/rref.h"

namespace muster::rpc {

/// What the worker of a remote module keeps: the module itself, on its device.
template <class Module>
struct ModuleHere {
  std::shared_ptr<Module> module;
  at::Device device = at::kCPU;
  Module* operator->() const { return module.get(); }
};

namespace detail {

/// "worker1/cuda:0" in its parts; throws DistError where it is no such text.
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

/// On every worker that is to hold such modules. Module: an Impl class with one forward; Arguments:
/// those of the constructor that it is made with.
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

  /// Makes it there and waits for it; throws what its constructor threw.
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
  /// The output stays on the module's worker: to be passed on to where it is needed.
  template <class... Arguments>
  RRef<Result> forward_rref(const Arguments&... arguments) const {
    return module_.remote().template call<Result>(detail::forward_of(name_), arguments...);
  }
  /// Of all submodules too where `recurse`; in the order of Module::parameters().
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
