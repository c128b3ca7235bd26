// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing::scheduled {
namespace {

namespace optim = torch::optim;

std::vector<at::Tensor> weights() {
  std::vector<at::Tensor> all;
  for (const std::int64_t size : {7, 3, 11, 5})
    all.push_back(torch::ones({size}).set_requires_grad(true));
  return all;
}

/// Uses both of torch's schedulers with two parameter groups; records the groups' learning rates
/// after each step.
template <class Options, class Optimizer>
std::vector<double> scheduled(Optimizer& optimizer, const std::vector<at::Tensor>& all) {
  optim::StepLR steps(optimizer, 2, 0.5);
  optim::ReduceLROnPlateauScheduler plateau(optimizer, optim::ReduceLROnPlateauScheduler::min, 0.1F,
                                            /*patience=*/1);
  std::vector<double> rates;
  for (int step = 0; step < 6; ++step) {
    for (at::Tensor each : all) each.mutable_grad() = torch::full_like(each, 0.1 * (step + 1));
    optimizer.step();
    steps.step();
    plateau.step(1);
    for (auto& group : optimizer.param_groups())
      rates.push_back(static_cast<Options&>(group.options()).get_lr());
    optimizer.zero_grad();
    EXPECT_FALSE(all.front().grad().defined());
  }
  return rates;
}

template <class Kind, class Options>
void compare(const Options& options) {
  const auto whole = weights(), divided = weights();
  Options other = options;
  other.set_lr(0.3);
  const auto groups = [&](const std::vector<at::Tensor>& all) {
    return std::vector<optim::OptimizerParamGroup>{
        {{all[0], all[1]}}, {{all[2], all[3]}, std::make_unique<Options>(other)}};
  };
  Kind plain(groups(whole), options);
  ZeroRedundancyOptimizer<Kind> optimizer(groups(divided), options);
  EXPECT_EQ(scheduled<Options>(optimizer, divided), scheduled<Options>(plain, whole));
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_SAME(divided[i], whole[i]);
  EXPECT_EQ(static_cast<const Options&>(optimizer.defaults()).get_lr(), options.get_lr());
}

// spec: K8 torch's schedulers work on the divided optimizer as on the undivided
TEST(ScheduledOptimizers, HaveTheSameRatesAndWeights) {
  on_ranks(2, [](int) {
    compare<optim::SGD>(optim::SGDOptions(0.1).momentum(0.5));
    compare<optim::Adam>(optim::AdamOptions(0.1));
  });
}

}  // namespace
}  // namespace muster::testing::scheduled
