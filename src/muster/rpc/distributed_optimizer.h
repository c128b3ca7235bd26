/// An optimizer over parameters that live on several workers:
/// torch.distributed.optim.DistributedOptimizer.
///
///     DistributedOptimizer<torch::optim::SGD> optimizer(module.remote_parameters(),
///         torch::optim::SGDOptions(0.05));
///     dist_autograd::context context;
///     ... backward(context.context_id(), {loss}) ...
///     optimizer.step(context.context_id());
///
/// Each owner makes one optimizer of its parameters; `step` has all of them apply the gradients of
/// one context. Every optimizer of torch but LBFGS, which asks for the loss again and again; one of
/// your own after `register_optimizer` on all workers.
///
/// Several trainers may step at once, through one optimizer or through their own over the same
/// parameters. Their steps do not trample: on an owner one step runs after the other, whole, each
/// from the parameters that the one before it left. A step's gradients come from its own context
/// and are given to the optimizer for the time of that step alone, so none sees another's; the
/// parameters' own `grad()` is not touched. The optimizer writes through views with a version count
/// of their own: what another trainer's forward has saved stays usable, as with torch's functional
/// optimizers. Its backward then sees the newer values, which is what training without a barrier
/// between trainers (Hogwild) means: trainers that must not have that wait for each other.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "muster/rpc/rref.h"

namespace muster::rpc {

/// Makes an optimizer of `parameters`; `options`: as pack_options wrote them.
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor> parameters, const std::string& options)>;
void register_optimizer(const std::string& name, const std::type_info& type, MakeOptimizer make);
std::string pack_options(const torch::optim::OptimizerOptions& options);
void unpack_options(const std::string& bytes, torch::optim::OptimizerOptions& options);

/// On every worker that is to run it, under the same name. Options: serialisable as torch's, made
/// of nothing or of a learning rate.
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

/// What an owner keeps.
struct OwnerOptimizer {
  struct State;
  std::shared_ptr<State> state;
};
/// One per owner of `parameters`, all made when it returns; throws what their making threw.
std::vector<RRef<OwnerOptimizer>> make_optimizers(const std::type_info& type,
                                                  const std::vector<RRef<at::Tensor>>& parameters,
                                                  const torch::optim::OptimizerOptions& options);
void step(const std::vector<RRef<OwnerOptimizer>>& optimizers, std::int64_t context_id);
/// Done when a worker's layers start.
void register_optimizer_functions();

}  // namespace detail

template <class Optimizer>
class DistributedOptimizer {
 public:
  /// `parameters`: tensors, of any owners, each once. Blocks until all owners have made theirs.
  DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters,
                       const torch::optim::OptimizerOptions& options)
      : optimizers_(detail::make_optimizers(typeid(Optimizer), parameters, options)) {}

  /// One step on every owner with the gradients that the context has there; a parameter without one
  /// stays as it is. Blocks until all have stepped; then throws the first failure.
  void step(std::int64_t context_id) { detail::step(optimizers_, context_id); }

 private:
  std::vector<RRef<detail::OwnerOptimizer>> optimizers_;
};

}  // namespace muster::rpc
