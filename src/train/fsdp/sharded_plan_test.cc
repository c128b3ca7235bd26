// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_plan.h"

#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <map>
#include <vector>

#include "muster/device_mesh.h"
#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

using parallel::MemoryPlan;
using parallel::MemoryPlanOptions;
using parallel::plan_memory;

TEST(ShardedPlan, IsArithmetic) {
  const MemoryPlan plan = plan_memory(10, {100, 300, 200}, {.ranks = 4});
  EXPECT_EQ(plan.parameters, 153 * 4);
  EXPECT_EQ(plan.gradients, 153 * 4);
  EXPECT_EQ(plan.optimizer, 2 * 153 * 4);
  EXPECT_EQ(plan.gathered_peak, (10 + 500) * 4);
  EXPECT_EQ(plan.staging_peak, 300 * 8 + 75 * 4);
  const auto gathered = [](MemoryPlanOptions options) {
    return plan_memory(10, {100, 300, 200}, options).gathered_peak / 4;
  };
  EXPECT_EQ(gathered({.ranks = 4, .gathered_ahead = 0}), 310);
  EXPECT_EQ(gathered({.ranks = 4, .keeps_after_forward = true}), 610);
  // The second and third whole, and half of the first and of the second.
  EXPECT_EQ(gathered({.ranks = 4, .part_ranks = 2}), 10 + 500 + 200);
  // The third whole, and half of all.
  EXPECT_EQ(gathered({.ranks = 4, .part_ranks = 2, .gathered_ahead = 0}), 10 + 200 + 300);
  EXPECT_EQ(plan_memory(0, {}, {}).gathered_peak, 0);
}

struct Case {
  const char* name;
  int ranks;
  std::vector<int> mesh;
  Options options;
  MemoryPlanOptions plan;
};

std::vector<Case> cases() {
  using enum ShardingStrategy;
  const auto with = [](auto change) {
    Options options{.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()};
    change(options);
    return options;
  };
  MixedPrecision narrow{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  return {
      {"whole", 2, {}, with([](Options&) {}), {.ranks = 2}},
      {"four", 4, {}, with([](Options&) {}), {.ranks = 4}},
      {"no prefetch",
       3,
       {},
       with([](Options& each) { each.backward_prefetch = {}; }),
       {.ranks = 3, .gathered_ahead = 0}},
      {"kept",
       2,
       {},
       with([](Options& each) { each.sharding_strategy = SHARD_GRAD_OP; }),
       {.ranks = 2, .keeps_after_forward = true}},
      {"part",
       4,
       {},
       with([](Options& each) { each.reshard_after_forward = 2; }),
       {.ranks = 4, .part_ranks = 2}},
      {"hybrid",
       4,
       {2, 2},
       with([](Options& each) { each.sharding_strategy = HYBRID_SHARD; }),
       {.ranks = 2}},
      {"no shard",
       2,
       {},
       with([](Options& each) { each.sharding_strategy = NO_SHARD; }),
       {.ranks = 1}},
      {"narrow",
       2,
       {},
       with([&](Options& each) { each.mixed_precision = narrow; }),
       {.ranks = 2, .gathered_bytes_per_element = 2}},
  };
}

// spec: M3 T5 measured memory per rank is within 10 % of the plan, for every strategy
TEST(ShardedPlan, IsWhatIsMeasured) {
  for (const Case& test : cases())
    on_ranks(test.ranks, [&](int) {
      std::vector<std::int64_t> elements;
      nn::Sequential layers;
      for (const std::int64_t width : {96, 128, 160, 128}) {
        const std::int64_t in =
            elements.empty() ? 64
                             : layers[layers->size() - 1]->as<nn::Linear>()->options.out_features();
        layers->push_back(nn::Linear(in, width));
        elements.push_back(in * width + width);
      }
      Options options = test.options;
      if (!test.mesh.empty()) options.device_mesh = init_device_mesh("cpu", test.mesh);
      FullyShardedDataParallel<nn::Sequential> model(layers, options);
      torch::optim::Adam optimizer(layers->parameters());
      model.reset_peak_memory();
      model.forward(torch::ones({2, 64})).sum().backward();
      optimizer.step();
      std::int64_t state = 0;
      for (const auto& [key, value] : optimizer.state()) {
        const auto& of = static_cast<torch::optim::AdamParamState&>(*value);
        state += (of.exp_avg().numel() + of.exp_avg_sq().numel()) * 4;
      }
      const auto plan = plan_memory(0, elements, test.plan);
      const auto measured = model.memory();
      const auto expect_near = [&](std::int64_t found, std::int64_t planned, const char* what) {
        EXPECT_NEAR(static_cast<double>(found), static_cast<double>(planned),
                    0.1 * static_cast<double>(planned))
            << what << ", " << test.name;
      };
      expect_near(measured.parameters, plan.parameters, "parameters");
      expect_near(measured.gradients, plan.gradients, "gradients");
      expect_near(state, plan.optimizer, "optimizer");
      expect_near(measured.gathered_peak, plan.gathered_peak, "gathered");
      expect_near(measured.staging_peak, plan.staging_peak, "staging");
    });
}

}  // namespace
}  // namespace muster::testing::fsdp
