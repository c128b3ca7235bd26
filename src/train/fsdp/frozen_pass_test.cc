// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing::frozen {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

/// Has buffers that every training forward changes.
struct JudgeImpl : nn::Module {
  JudgeImpl()
      : in(register_module("in", nn::Linear(4, 6))),
        norm(register_module("norm", nn::BatchNorm1d(6))),
        out(register_module("out", nn::Linear(6, 1))) {
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    double salt = 0;
    for (auto& each : parameters())
      each.copy_(torch::sin(torch::arange(each.numel(), at::kDouble) * 1.3 + (salt += 17))
                     .view(each.sizes()) *
                 0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(norm(in(x)))); }
  nn::Linear in;
  nn::BatchNorm1d norm;
  nn::Linear out;
};
TORCH_MODULE(Judge);

at::Tensor rows_of(int rank, int step) {
  return torch::sin(torch::arange(20, at::kDouble) * (rank + 1.5) + step).view({5, 4});
}

void freeze(nn::Module& module, bool frozen) {
  for (auto& each : module.parameters()) each.requires_grad_(!frozen);
}

/// Inputs learn from the frozen judge, then the judge from them. `judge(rank)` is called equally
/// often on all ranks.
template <class Call>
void step_in_turn(nn::Module& module, torch::optim::Optimizer& optimizer, at::Tensor rows,
                  Call judge) {
  freeze(module, true);
  rows.requires_grad_(true);
  judge(rows).square().mean().backward();
  freeze(module, false);
  optimizer.zero_grad();
  (judge(rows.detach() - rows.grad()) - 1).square().mean().backward();
  optimizer.step();
}

/// Runs on the first of `ranks` alone: its loss is the mean of all ranks' losses, and its batch
/// norm sees each rank's rows separately. Its buffers do not affect training.
at::Tensor trained_alone(int ranks, int steps) {
  Judge judge;
  torch::optim::SGD optimizer(judge->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  for (int step = 0; step < steps; ++step) {
    std::vector<at::Tensor> moved;
    freeze(*judge, true);
    for (int rank = 0; rank < ranks; ++rank) {
      auto rows = rows_of(rank, step).requires_grad_(true);
      judge(rows).square().mean().backward();
      moved.push_back(rows.detach() - rows.grad());
    }
    freeze(*judge, false);
    optimizer.zero_grad();
    for (const auto& rows : moved) ((judge(rows) - 1).square().mean() / ranks).backward();
    optimizer.step();
  }
  return flat(judge->parameters());
}

// spec: K2.frozen passes in which all of a model is frozen, between those that train it, with every
// option
TEST(FrozenPasses, LeaveTrainingAsItIs) {
  for (const int ranks : {1, 2, 3}) {
    const auto alone = trained_alone(ranks, 5);
    const std::vector<Options> variants{{},
                                        {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true},
                                        {.find_unused_parameters = true},
                                        {.static_graph = true},
                                        {.broadcast_buffers = false}};
    for (const Options& options : variants)
      on_ranks(ranks, [&](int rank) {
        Judge judge;
        DistributedDataParallel<Judge> model(judge, options);
        torch::optim::SGD optimizer(judge->parameters(),
                                    torch::optim::SGDOptions(0.1).momentum(0.5));
        for (int step = 0; step < 5; ++step)
          step_in_turn(*judge, optimizer, rows_of(rank, step),
                       [&](const at::Tensor& x) { return model(x); });
        EXPECT_LT((flat(judge->parameters()) - alone).abs().max().item<double>(), 1e-12);
      });
  }
}

// spec: K7 and inside a Join, in which the others' buffers are still broadcast
TEST(FrozenPasses, AreShadowedInAJoin) {
  on_ranks(3, [](int rank) {
    Judge judge;
    DistributedDataParallel<Judge> model(judge, {.bucket_cap_mb = 0.0001});
    torch::optim::SGD optimizer(judge->parameters(), torch::optim::SGDOptions(0.1));
    auto join = model.join();
    join.run([&] {
      for (int step = 0; step < 2 + rank; ++step)
        step_in_turn(*judge, optimizer, rows_of(rank, step),
                     [&](const at::Tensor& x) { return model(x); });
    });
    auto first = flat(judge->parameters());
    broadcast(first, {.src = 0});
    EXPECT_SAME(first, flat(judge->parameters()));
  });
}

// spec: K1 mixed_precision: full parameters are back when a pass in which all is frozen has ended
TEST(FrozenPasses, GiveFullParametersBack) {
  on_ranks(2, [](int) {
    nn::Linear layer(3, 2);
    DistributedDataParallel<nn::Linear> model(
        layer, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    freeze(*layer, true);
    const auto rows = torch::ones({1, 3}).requires_grad_(true);
    {
      const auto once = model(rows), twice = model(rows);
      EXPECT_EQ(layer->weight.scalar_type(), at::kBFloat16);
      (once + twice).sum().backward();
      EXPECT_EQ(layer->weight.scalar_type(), at::kFloat) << "while the outputs are still there";
    }
    EXPECT_EQ(model(torch::ones({1, 3})).scalar_type(), at::kBFloat16);
    EXPECT_EQ(layer->weight.scalar_type(), at::kFloat) << "no backward can follow";
    freeze(*layer, false);
    model(rows).sum().backward();
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  });
}

// spec: H5 a module of which a part is frozen after it was wrapped is named
TEST(FrozenPasses, OfAPartAreRefused) {
  on_ranks(2, [](int) {
    Judge judge;
    DistributedDataParallel<Judge> model(judge);
    barrier();
    judge->in->bias.requires_grad_(false);
    EXPECT_HAS(message_of<DistError>([&] { model(rows_of(0, 0)); }),
               "'in.bias' was trained then, and is not now, while others are");
  });
}

}  // namespace
}  // namespace muster::testing::frozen
