// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/module_parts.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_set>

#include "train/modules/ddp_logging.h"

namespace muster::parallel {
namespace {

void mark_sparse(const torch::nn::Module& module, std::vector<ModuleParts::Named>& parameters) {
  std::vector<at::Tensor> weights;
  for (const auto& each : module.modules()) {
    if (const auto* embedding = each->as<torch::nn::Embedding>();
        embedding != nullptr && embedding->options.sparse())
      weights.push_back(embedding->weight);
    if (const auto* bag = each->as<torch::nn::EmbeddingBag>();
        bag != nullptr && bag->options.sparse())
      weights.push_back(bag->weight);
  }
  for (ModuleParts::Named& parameter : parameters)
    parameter.sparse = std::any_of(weights.begin(), weights.end(), [&](const at::Tensor& each) {
      return each.is_same(parameter.tensor);
    });
}

/// Accesses a module's own parameters directly; the public interface copies their names.
struct Peek : torch::nn::Module {
  static const auto& own_parameters(const torch::nn::Module& module) {
    return module.*&Peek::parameters_;
  }
};

void collect_parameters(const torch::nn::Module& module, std::vector<at::Tensor>& all) {
  for (const auto& item : Peek::own_parameters(module))
    if (item.value().defined()) all.push_back(item.value());
  for (const auto& child : module.children()) collect_parameters(*child, all);
}

}  // namespace

std::vector<ModuleParts::Named> once_each(const std::vector<ModuleParts::Named>& registered) {
  std::unordered_set<const void*> seen;
  std::vector<ModuleParts::Named> all;
  for (const ModuleParts::Named& each : registered)
    if (each.tensor.defined() && seen.insert(each.tensor.unsafeGetTensorImpl()).second)
      all.push_back(each);
  return all;
}

ModuleParts parts_of(torch::nn::Module& module) {
  ModuleParts parts{.class_name = module_name_of(module.name()),
                    .parameters = {},
                    .buffers = {},
                    .keeps_alive = module.weak_from_this().lock()};
  for (const auto& item : module.named_parameters())
    parts.parameters.push_back({item.key(), item.value()});
  for (const auto& item : module.named_buffers())
    parts.buffers.push_back({item.key(), item.value()});
  mark_sparse(module, parts.parameters);
  return parts;
}

std::vector<at::Tensor> parameters_of(const torch::nn::Module& module, std::size_t expected) {
  std::vector<at::Tensor> all;
  all.reserve(expected);
  collect_parameters(module, all);
  return all;
}

}  // namespace muster::parallel
