// SPDX-License-Identifier: BSD-3-Clause
/// A model whose layers do in the midst of their work what a test asks for, for tests of overlap.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "muster/parallel.h"

namespace muster::testing::fsdp {

/// Computes, without a call of its own.
inline void compute_until(const std::function<bool()>& done) {
  auto numbers = torch::ones({8, 8});
  while (!done()) {
    numbers = numbers.matmul(numbers).clamp_max(1);
    std::this_thread::yield();
  }
}

/// A layer that calls `in_forward` before it computes, and `in_backward` before it makes its
/// gradients.
struct BusyImpl : torch::nn::Module {
  explicit BusyImpl(std::int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (in_forward) in_forward();
    const auto y = linear(x);
    if (y.requires_grad())
      y.register_hook([this](const at::Tensor&) {
        if (in_backward) in_backward();
      });
    return torch::tanh(y);
  }
  torch::nn::Linear linear;
  std::function<void()> in_forward, in_backward;
};

struct StackImpl : torch::nn::Module {
  StackImpl(int count, std::int64_t width) {
    for (int i = 0; i < count; ++i)
      layers.push_back(register_module(std::to_string(i), Shardable<BusyImpl>(width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& each : layers) x = each(x);
    return x;
  }
  std::vector<Shardable<BusyImpl>> layers;
};
TORCH_MODULE(Stack);

}  // namespace muster::testing::fsdp
