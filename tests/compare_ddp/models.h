// SPDX-License-Identifier: BSD-3-Clause
/// The models that are trained here and in `torch_worker.py`, operation for operation the same.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace muster::testing {

/// The input of one rank in one step.
struct Batch {
  at::Tensor x;  ///< numbers, or tokens
  at::Tensor y;  ///< numbers, or tokens
  bool flag = false;
};

class Model : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const Batch& batch) = 0;
};

struct Case {
  std::string name;
  std::vector<std::int64_t> x_shape;  ///< of one batch
  std::vector<std::int64_t> y_shape;
  int tokens = 0;  ///< not 0: x are whole numbers below it
  bool y_is_tokens = false;
  bool find_unused = false;
  double bucket_cap_mb = 25;
  double momentum = 0.9;
  bool join = false;
  bool divide_by_initial = true;
};

const std::vector<Case>& cases();
std::shared_ptr<Model> make_model(const std::string& name, at::ScalarType dtype);
at::Tensor loss_of(const Case& what, const at::Tensor& output, const at::Tensor& y);

}  // namespace muster::testing
