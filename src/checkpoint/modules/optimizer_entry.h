// SPDX-License-Identifier: BSD-3-Clause
/// State and options of torch's optimizers, by torch's names in Python. Their C++ classes give no
/// access to them through a base class, so each class is known here.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/modules/items.h"

namespace muster::checkpoint {
/// One field of a parameter's state: a tensor, or the count of steps.
struct StateField {
  const char* name;
  at::Tensor* tensor;   ///< or null
  std::int64_t* count;  ///< or null
};

/// Throws DistError naming the class where it is none of torch's that treat each parameter by
/// itself.
std::vector<StateField> fields_of(torch::optim::OptimizerParamState& state);
/// New, empty state of a parameter whose group has these options.
std::unique_ptr<torch::optim::OptimizerParamState> new_state_for(
    const torch::optim::OptimizerOptions& options);

/// The class by torch's name in Python ("Adam"). Throws as the functions above do.
std::string class_name(const torch::optim::OptimizerOptions& options);

/// Options as a JSON object ({"lr": 0.001, "betas": [0.9, 0.999]}) and back; names that are absent
/// stay as they are.
std::string text_of_options(const torch::optim::OptimizerOptions& options);
void read_options(torch::optim::OptimizerOptions& options, const std::string& text);

// An optimizer as a State has it; for ZeRO, the part that this rank has.

class OptimizerEntry {
 public:
  OptimizerEntry(std::string name, torch::optim::Optimizer& optimizer, const torch::nn::Module& of);

  void items(std::vector<CheckpointItem>& items);
  void values(nlohmann::json& values);

  /// Compares the optimizer with the one that was saved, and adds memory for its state. Nothing of
  /// the optimizer changes before `filled`. Throws DistError naming what differs: the class, the
  /// groups, a parameter's name or sizes. `values` null: files of others, which have none.
  void wanted(std::vector<CheckpointItem>& items, const shards::Index& index,
              const nlohmann::json* values);
  /// After the tensors have been loaded.
  void filled();

 private:
  using ParamState = torch::optim::OptimizerParamState;

  torch::optim::Optimizer& part();
  const std::string& name_of(const at::Tensor& parameter) const;
  std::string field_name(const at::Tensor& parameter, const char* field) const;
  nlohmann::json groups() const;
  void compare(const nlohmann::json& values, const shards::Index& index) const;
  void refuse_state_of_others(const shards::Index& index);

  const std::string name_;
  torch::optim::Optimizer& whole_;
  std::unordered_map<const void*, std::string> names_;
  // From `wanted` to `filled`.
  std::vector<std::pair<void*, std::unique_ptr<ParamState>>> made_;  // null: none was saved
  std::vector<std::pair<std::int64_t*, at::Tensor>> counts_;
  std::vector<std::string> options_;  // JSON, of each group
};

}  // namespace muster::checkpoint
