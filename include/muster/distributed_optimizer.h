// SPDX-License-Identifier: BSD-3-Clause
/// An optimizer over parameters on several workers: torch.distributed.optim.DistributedOptimizer.
///
///     DistributedOptimizer<torch::optim::SGD> optimizer(module.remote_parameters(),
///         torch::optim::SGDOptions(0.05));
///     dist_autograd::context context;
///     ... backward(context.context_id(), {loss}) ...
///     optimizer.step(context.context_id());
///
/// Each owner makes one optimizer of its parameters; `step` applies the gradients of one context on
/// all owners. Supports every optimizer of torch except LBFGS, which evaluates the loss repeatedly,
/// and your own after `register_optimizer` on all workers.
///
/// Several trainers may step at once, through one optimizer or through their own over the same
/// parameters. Each owner runs the steps one after the other, and each step starts from the
/// parameters the previous one left. A step's gradients come from its own context and are visible
/// to the optimizer only during that step; the parameters' `grad()` is not touched. The optimizer
/// writes through views with their own version counter, so tensors saved by another trainer's
/// forward stay usable, as with torch's functional optimizers. That trainer's backward then uses
/// the newer values (Hogwild); trainers that must not see them need a barrier.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "muster/rref.h"

namespace muster::rpc {

/// Makes an optimizer of `parameters`. `options` is the output of pack_options.
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor> parameters, const std::string& options)>;
void register_optimizer(const std::string& name, const std::type_info& type, MakeOptimizer make);
std::string pack_options(const torch::optim::OptimizerOptions& options);
void unpack_options(const std::string& bytes, torch::optim::OptimizerOptions& options);

/// Registers an optimizer; call it on every worker that is to run it, under the same name. Options
/// must be serialisable like torch's and constructible from nothing or from a learning rate.
template <class Optimizer, class Options>
void register_optimizer(const std::string& name) {
  register_optimizer(name, typeid(Optimizer),
                     [](std::vector<at::Tensor> parameters,
                        const std::string& bytes) -> std::unique_ptr<torch::optim::Optimizer> {
                       auto options = [] {
                         if constexpr (std::is_default_constructible_v<Options>) {
                           return Options();
                         } else {
                           return Options(0.0);
                         }
                       }();
                       unpack_options(bytes, options);
                       return std::make_unique<Optimizer>(std::move(parameters), options);
                     });
}

namespace detail {

/// The optimizer on an owner.
struct OwnerOptimizer {
  struct State;
  std::shared_ptr<State> state;
};
/// Makes one optimizer per owner of `parameters` and waits for all of them; throws what a
/// constructor threw.
std::vector<RRef<OwnerOptimizer>> make_optimizers(const std::type_info& type,
                                                  const std::vector<RRef<at::Tensor>>& parameters,
                                                  const torch::optim::OptimizerOptions& options);
void step(const std::vector<RRef<OwnerOptimizer>>& optimizers, std::int64_t context_id);
/// Called when a worker's extensions are installed.
void register_optimizer_functions();

}  // namespace detail

template <class Optimizer>
class DistributedOptimizer {
 public:
  /// `parameters` may have any owners; each is given once. Blocks until every owner has made its
  /// optimizer.
  DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters,
                       const torch::optim::OptimizerOptions& options)
      : optimizers_(detail::make_optimizers(typeid(Optimizer), parameters, options)) {}

  /// Performs one step on every owner with the context's gradients there; a parameter without a
  /// gradient is unchanged. Blocks until all have stepped, then throws the first failure.
  void step(std::int64_t context_id) { detail::step(optimizers_, context_id); }

 private:
  std::vector<RRef<detail::OwnerOptimizer>> optimizers_;
};

}  // namespace muster::rpc
