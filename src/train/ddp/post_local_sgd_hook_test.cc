// SPDX-License-Identifier: BSD-3-Clause
#include "muster/model_averaging.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "muster/subgroups.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;

nn::Linear net_of_zeros() {
  nn::Linear net(1, 1);
  const torch::NoGradGuard no_grad;
  for (auto& each : net->parameters()) each.zero_();
  return net;
}

/// Averages a gradient of rank + 1 on each rank, `passes` times; returns each pass's result.
std::vector<double> gradients(int rank, int passes, const CommHook& hook) {
  auto net = net_of_zeros();
  DistributedDataParallel<nn::Linear> model(net);
  model.register_comm_hook(hook);
  std::vector<double> all;
  for (int pass = 0; pass < passes; ++pass) {
    net->zero_grad();
    model.forward(torch::full({1, 1}, rank + 1.0)).sum().backward();
    all.push_back(net->weight.grad().item<double>());
  }
  return all;
}

// spec: K4 post-local SGD: all ranks first, then the subgroup, or none
TEST(PostLocalSGDHook, AveragesTogetherFirstAndNearbyLater) {
  on_ranks(4, [](int rank) {
    const auto pair = new_subgroups(2).first;
    const double near = rank < 2 ? 1.5 : 3.5;
    const auto hook = [&](bool averages_later) {
      return post_localSGD_hook(std::make_shared<PostLocalSGDState>(
          PostLocalSGDOptions{.subgroup = pair,
                              .start_localSGD_iter = 2,
                              .post_local_gradient_allreduce = averages_later}));
    };
    EXPECT_EQ(gradients(rank, 4, hook(true)), (std::vector<double>{2.5, 2.5, near, near}));
    EXPECT_EQ(gradients(rank, 4, hook(false)),
              (std::vector<double>{2.5, 2.5, rank + 1.0, rank + 1.0}));
    // All ranks of this test are on one host.
    const auto host = post_localSGD_hook(
        std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{.start_localSGD_iter = 1}));
    EXPECT_EQ(gradients(rank, 2, host), (std::vector<double>{2.5, 2.5}));
  });
}

TEST(PeriodicModelAverager, AveragesEveryPeriodAfterTheWarmUp) {
  on_ranks(3, [](int rank) {
    auto trained = torch::zeros({2}).set_requires_grad(true),
         wide = torch::zeros({}, at::kDouble).set_requires_grad(true),
         frozen = torch::full({2}, rank + 0.5);
    torch::optim::SGD optimizer({trained, wide, frozen}, torch::optim::SGDOptions(1));
    PeriodicModelAverager averager({.period = 3, .warmup_steps = 2});
    for (int step = 0; step < 9; ++step) {
      const bool averages = step == 2 || step == 5 || step == 8;
      {
        const torch::NoGradGuard no_grad;
        trained.fill_(rank + step);
        wide.fill_(10 * rank);
      }
      trained.mutable_grad() = torch::zeros({2});
      wide.mutable_grad() = torch::zeros({}, at::kDouble);
      step % 2 == 0 ? averager.average_parameters(optimizer)
                    : averager.average_parameters({trained, wide, frozen});
      EXPECT_SAME(trained.detach(), torch::full({2}, step + (averages ? 1.0 : rank)))
          << "step " << step;
      EXPECT_EQ(wide.item<double>(), averages ? 10.0 : 10.0 * rank);
      EXPECT_SAME(frozen, torch::full({2}, rank + 0.5));
    }
    EXPECT_EQ(averager.step(), 9);
    averager.set_step(11);  // resumed from a checkpoint: the next average is due immediately
    averager.average_parameters(optimizer);
    EXPECT_EQ(trained[0].item<float>(), 9);
  });
}

TEST(PeriodicModelAverager, StaysInItsGroup) {
  on_ranks(3, [](int rank) {
    const auto pair = new_group({.ranks = {0, 2}});
    auto weight = torch::full({1}, static_cast<float>(rank)).set_requires_grad(true);
    weight.mutable_grad() = torch::zeros({1});
    PeriodicModelAverager averager({.process_group = pair});
    averager.average_parameters({weight});
    EXPECT_EQ(weight.item<float>(), 1) << "the mean of 0 and 2, and rank 1 as it was";
    EXPECT_HAS(message_of<DistError>([] { PeriodicModelAverager({.period = 0}); }),
               "period must be at least 1");
    EXPECT_HAS(message_of<DistError>([] { PeriodicModelAverager({.warmup_steps = -1}); }),
               "warmup_steps must not be negative");
  });
}

// spec: K4 post-local SGD: between two averages the models go their own ways
TEST(PostLocalSGD, EndsWithTheSameModelEverywhere) {
  on_ranks(4, [](int rank) {
    auto net = net_of_zeros();
    DistributedDataParallel<nn::Linear> model(net);
    model.register_comm_hook(post_localSGD_hook(std::make_shared<PostLocalSGDState>(
        PostLocalSGDOptions{.subgroup = new_subgroups(2).first, .start_localSGD_iter = 4})));
    PeriodicModelAverager averager({.period = 3, .warmup_steps = 4});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
    for (int step = 0; step < 11; ++step) {
      optimizer.zero_grad();
      const auto x = torch::full({2, 1}, 1.0 + rank);
      (model.forward(x) - 3 * x).square().mean().backward();
      optimizer.step();
      averager.average_parameters(optimizer);
      auto most = net->weight.detach().clone(), least = most.clone();
      all_reduce(most, {.op = ReduceOp::MAX});
      all_reduce(least, {.op = ReduceOp::MIN});
      EXPECT_EQ(torch::equal(most, least), step <= 4 || step == 7 || step == 10) << "step " << step;
    }
  });
}

}  // namespace
}  // namespace muster::testing
