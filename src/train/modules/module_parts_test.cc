// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/module_parts.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

namespace muster::testing {
namespace {

namespace nn = torch::nn;

/// A nested module, a module registered twice, and a missing bias.
struct Nested : nn::Module {
  nn::Linear shared{register_module("shared", nn::Linear(3, 3))};
  nn::Sequential inner{register_module(
      "inner",
      nn::Sequential(nn::BatchNorm1d(3), shared, nn::Linear(nn::LinearOptions(3, 2).bias(false))))};
  at::Tensor scale{register_parameter("scale", torch::ones({2}))};
  nn::Linear last{register_module("last", nn::Linear(2, 1))};
};

TEST(ModuleParts, ParametersAreTheModulesOwnInItsOrder) {
  const Nested net;
  const auto expected = net.parameters();
  const auto found = parallel::parameters_of(net, 0);
  ASSERT_EQ(found.size(), expected.size());
  ASSERT_GT(found.size(), 9U);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].is_same(expected[i])) << i;
}

}  // namespace
}  // namespace muster::testing
