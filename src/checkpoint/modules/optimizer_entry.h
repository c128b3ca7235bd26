/// An optimizer as a State has it; for ZeRO, the part that this rank has.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/modules/items.h"

namespace muster::checkpoint {

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
