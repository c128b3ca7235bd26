// SPDX-License-Identifier: BSD-3-Clause
#include "muster/distributed_optimizer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <map>
#include <mutex>
#include <sstream>
#include <typeindex>

#include "muster/dist_autograd.h"
#include "rpc/agent/agent.h"

namespace muster::rpc {
namespace {

constexpr const char* kMake = "muster::optimizer::make";
constexpr const char* kReady = "muster::optimizer::ready";
constexpr const char* kStep = "muster::optimizer::step";

struct Known {
  std::mutex mutex;
  std::map<std::string, MakeOptimizer> make;
  std::map<std::type_index, std::string> names;
};
Known& known() {
  static Known known;
  return known;
}

// Serialises all steps on one worker, of all optimizers and trainers, because they may share
// parameters.
struct StepOrder {
  std::mutex mutex;
};

}  // namespace

struct detail::OwnerOptimizer::State {
  std::shared_ptr<StepOrder> order;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> views;  // the same memory, with their own version counter and grad
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

namespace {

detail::OwnerOptimizer make_here(const std::string& name, const std::string& options,
                                 const std::vector<RRef<at::Tensor>>& parameters) {
  MakeOptimizer make;
  {
    const std::lock_guard lock(known().mutex);
    const auto found = known().make.find(name);
    if (found == known().make.end())
      throw DistError("no optimizer '" + name +
                      "' is registered on this worker: register_optimizer");
    make = found->second;
  }
  auto state = std::make_shared<detail::OwnerOptimizer::State>();
  state->order =
      current_agent(kMake)->companion<StepOrder>([] { return std::make_shared<StepOrder>(); });
  for (const RRef<at::Tensor>& parameter : parameters) {
    const at::Tensor& tensor = parameter.local_value();
    if (!tensor.is_leaf() || !tensor.requires_grad())
      throw DistError("DistributedOptimizer: parameters are leaf tensors that require grad");
    state->parameters.push_back(tensor);
    state->views.push_back(tensor.variable_data().set_requires_grad(true));
  }
  state->optimizer = make(state->views, options);
  return {state};
}

void step_here(const RRef<detail::OwnerOptimizer>& held, std::int64_t context_id) {
  const auto state = held.local_value().state;
  const auto gradients = dist_autograd::get_gradients(context_id);
  const std::lock_guard lock(state->order->mutex);
  for (std::size_t i = 0; i < state->parameters.size(); ++i) {
    at::Tensor& view = state->views[i];
    if (!view.is_alias_of(state->parameters[i]))
      view.set_data(
          state->parameters[i].variable_data());  // the parameter's memory has been replaced
    const auto found = gradients.find(state->parameters[i]);
    view.mutable_grad() = found == gradients.end() ? at::Tensor() : found->second.detach();
  }
  const auto forget = [&] {
    for (at::Tensor& view : state->views) view.mutable_grad() = at::Tensor();
  };
  try {
    state->optimizer->step();
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

}  // namespace

void register_optimizer(const std::string& name, const std::type_info& type, MakeOptimizer make) {
  const std::lock_guard lock(known().mutex);
  if (!known().make.emplace(name, std::move(make)).second)
    throw DistError("an optimizer '" + name + "' is registered already");
  known().names.emplace(type, name);
}

std::string pack_options(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

void unpack_options(const std::string& bytes, torch::optim::OptimizerOptions& options) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  options.serialize(archive);
}

namespace detail {

void register_optimizer_functions() {
  static const bool once = [] {
    namespace optim = torch::optim;
    register_optimizer<optim::SGD, optim::SGDOptions>("torch::optim::SGD");
    register_optimizer<optim::Adam, optim::AdamOptions>("torch::optim::Adam");
    register_optimizer<optim::AdamW, optim::AdamWOptions>("torch::optim::AdamW");
    register_optimizer<optim::Adagrad, optim::AdagradOptions>("torch::optim::Adagrad");
    register_optimizer<optim::RMSprop, optim::RMSpropOptions>("torch::optim::RMSprop");
    register_function(kMake, make_here);
    register_function(kReady, [](const RRef<OwnerOptimizer>& held) { held.local_value(); });
    register_function(kStep, step_here);
    return true;
  }();
  (void)once;
}

std::vector<RRef<OwnerOptimizer>> make_optimizers(const std::type_info& type,
                                                  const std::vector<RRef<at::Tensor>>& parameters,
                                                  const torch::optim::OptimizerOptions& options) {
  std::string name;
  {
    const std::lock_guard lock(known().mutex);
    const auto found = known().names.find(type);
    if (found == known().names.end()) {
      throw DistError("DistributedOptimizer: " + type_name(type) +
                      " is not registered: register_optimizer (LBFGS cannot be: it asks for the "
                      "loss again and again)");
    }
    name = found->second;
  }
  if (parameters.empty()) throw DistError("DistributedOptimizer needs parameters");
  std::map<int, std::vector<RRef<at::Tensor>>> by_owner;
  for (const RRef<at::Tensor>& parameter : parameters)
    by_owner[parameter.owner().id()].push_back(parameter);
  const std::string bytes = pack_options(options);
  std::vector<RRef<OwnerOptimizer>> made;
  for (const auto& [owner, of_owner] : by_owner)
    made.push_back(remote<OwnerOptimizer>(owner, kMake, name, bytes, of_owner));
  std::vector<Future<void>> ready;
  for (const RRef<OwnerOptimizer>& optimizer : made)
    ready.push_back(optimizer.rpc_async().call(kReady));
  for (const auto& future : ready) future.wait_until(TimePoint::max());
  for (const auto& future : ready) future.wait();
  return made;
}

void step(const std::vector<RRef<OwnerOptimizer>>& optimizers, std::int64_t context_id) {
  std::vector<Future<void>> steps;
  for (const RRef<OwnerOptimizer>& optimizer : optimizers)
    steps.push_back(optimizer.rpc_async().call(kStep, context_id));
  for (const auto& future : steps) future.wait_until(TimePoint::max());
  for (const auto& future : steps) future.wait();
}

}  // namespace detail
}  // namespace muster::rpc
