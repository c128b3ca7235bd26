/// What torch's optimizers remember and are set to, by torch's names in Python: their classes in
/// C++ show it to those who know the class only.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace muster::checkpoint {

/// Of one parameter: a tensor or the count of steps.
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

}  // namespace muster::checkpoint
