// SPDX-License-Identifier: BSD-3-Clause
/// Models, data and steps for the tests of sharding.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/thrown.h"

namespace muster::testing::fsdp {

namespace nn = torch::nn;
using Options = FullyShardedDataParallelOptions;

constexpr std::int64_t kSamples = 24;

inline void fill(nn::Module& module, std::uint64_t salt) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    const auto numbers =
        torch::arange(parameter.numel(), at::kDouble) + static_cast<double>(++salt * 17);
    parameter.copy_((torch::sin(numbers * 12.9898) * 0.5).view(parameter.sizes()));
  }
}

/// Blocks in a Sequential, and parameters outside of it; sizes that no number of ranks divides.
struct NetImpl : nn::Module {
  NetImpl()
      : first(register_module("first", nn::Linear(5, 7))),
        blocks(register_module(
            "blocks", nn::Sequential(nn::Linear(7, 9), nn::Tanh(), nn::Linear(9, 7), nn::Tanh()))),
        last(register_module("last", nn::Linear(7, 3))),
        scale(register_parameter("scale", torch::ones({1}))) {
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return last(blocks->forward(torch::tanh(first(x)))) * scale; }
  nn::Linear first;
  nn::Sequential blocks;
  nn::Linear last;
  at::Tensor scale;
};
TORCH_MODULE(Net);

inline Net net_of(std::uint64_t seed) {
  Net net;
  fill(*net, seed);
  return net;
}

inline at::Tensor inputs() {
  return torch::sin(torch::arange(kSamples * 5, at::kDouble) * 1.7).view({kSamples, 5});
}
inline at::Tensor targets() {
  return torch::cos(torch::arange(kSamples * 3, at::kDouble) * 0.9).view({kSamples, 3});
}
inline at::Tensor share(const at::Tensor& all, int rank, int ranks) {
  return all.chunk(ranks)[static_cast<std::size_t>(rank)];
}
inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

/// All parameters, on every rank.
template <class Model>
at::Tensor whole(Model& model) {
  const auto full = model.summon_full_params(false);
  return flat(model.module()->parameters()).clone();
}

inline const std::vector<Options> kVariants{
    {},
    {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()},
    {.auto_wrap_policy = size_based_auto_wrap_policy(72)},
    {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>(),
     .sharding_strategy = ShardingStrategy::SHARD_GRAD_OP},
};

/// Moves parameters and buffers to the meta device; they stay the same tensors.
inline void drop_values(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (const auto& tensors : {module.parameters(), module.buffers()})
    for (const at::Tensor& tensor : tensors)
      tensor.unsafeGetTensorImpl()->shallow_copy_from(
          torch::empty_like(tensor, torch::kMeta).getIntrusivePtr());
}

/// A layer that records the dtypes of its input, its weight and its buffer.
struct TypedImpl : nn::Module {
  TypedImpl()
      : linear(register_module("linear", nn::Linear(5, 4))),
        mean(register_buffer("mean", torch::ones({4}))) {}
  at::Tensor forward(const at::Tensor& x) {
    types = {x.scalar_type(), linear->weight.scalar_type(), mean.scalar_type()};
    return linear(x) + mean;
  }
  nn::Linear linear;
  at::Tensor mean;
  std::vector<at::ScalarType> types;
};
TORCH_MODULE(Typed);

}  // namespace muster::testing::fsdp
