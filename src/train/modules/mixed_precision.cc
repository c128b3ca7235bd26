// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/mixed_precision.h"

#include <torch/types.h>

#include <utility>

#include "train/modules/end_of_backward.h"

namespace muster::parallel {

at::Tensor cast_floating_point(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return dtype && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

void cast_in_place(const std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype) {
  for (const at::Tensor& tensor : tensors)
    if (dtype && tensor.is_floating_point()) tensor.set_data(tensor.detach().to(*dtype));
}

LowPrecision::LowPrecision(std::vector<at::Tensor> parameters,
                           const std::vector<at::Tensor>& buffers, const MixedPrecision& config)
    : config_(config) {
  for (at::Tensor& parameter : parameters)
    if (parameter.is_floating_point()) parameters_.push_back(std::move(parameter));
  cast_in_place(buffers, config.buffer_dtype);
}

bool LowPrecision::lower() {
  if (!config_.param_dtype || !full_.empty()) return false;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    full_.push_back(parameter.detach());
    parameter.set_data(full_.back().to(*config_.param_dtype));
  }
  return true;
}

void LowPrecision::restore() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < full_.size(); ++i) parameters_[i].set_data(full_[i]);
  full_.clear();
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    const bool low = config_.keep_low_precision_grads && config_.param_dtype;
    gradient = gradient.to(low ? *config_.param_dtype : parameter.scalar_type());
  }
}

/// Several forwards before one backward share one token, which the hooks on their graph hold.
void LowPrecision::watch(const std::vector<at::Tensor>& outputs, bool trained) {
  auto& graph = trained ? trained_ : frozen_;
  auto token = graph.lock();
  if (token == nullptr) token = std::make_shared<int>();
  graph = token;
  const auto hook = [token, trained, weak = weak_from_this()](const at::Tensor&) {
    if (trained) return;
    const auto at_end = [weak]() noexcept {
      const auto alive = weak.lock();
      if (!alive) return;
      alive->frozen_.reset();
      alive->restore_if_over();
    };
    at_end_of_backward(at_end, at_end);
  };
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad() && !output.is_leaf()) output.register_hook(hook);
}

void LowPrecision::restore_if_over() {
  if (is_low() && !(trained_.expired() && frozen_.expired())) return;
  restore();
  trained_.reset();
  frozen_.reset();
}

at::Tensor LowPrecision::cast(const at::Tensor& input) const {
  return config_.cast_forward_inputs ? cast_floating_point(input, config_.param_dtype) : input;
}

}  // namespace muster::parallel
