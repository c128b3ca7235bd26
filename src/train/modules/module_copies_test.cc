// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing::copies {
namespace {

namespace nn = torch::nn;

struct CopiedNetImpl : nn::Cloneable<CopiedNetImpl> {
  CopiedNetImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", nn::Linear(4, 3));
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    for (auto& each : parameters())
      each.copy_(torch::sin(torch::arange(each.numel(), at::kDouble) * 1.3).view(each.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  nn::Linear layer{nullptr};
};
TORCH_MODULE(CopiedNet);

at::Tensor rows_of(int rank, int step) {
  return torch::sin(torch::arange(20, at::kDouble) * (rank + 1.5) + step).view({5, 4});
}

// spec: K1.copies a clone of the module on one rank needs no other rank, and is not part of the
// model
TEST(ModuleCopies, OfOneRankWaitForNobody) {
  for (const bool as_view : {false, true})
    on_ranks(2, [&](int rank) {
      CopiedNet net;
      DistributedDataParallel<CopiedNet> model(net, {.gradient_as_bucket_view = as_view});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
      std::shared_ptr<CopiedNetImpl> copy;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model(rows_of(rank, step)).square().mean().backward();
        optimizer.step();
        if (rank != 0) continue;
        copy = std::dynamic_pointer_cast<CopiedNetImpl>(net->clone());
        EXPECT_SAME(copy->layer->weight, net->layer->weight);
        const auto before = flat(net->parameters());
        copy->forward(rows_of(0, 9)).square().mean().backward();
        torch::optim::SGD(copy->parameters(), torch::optim::SGDOptions(0.1)).step();
        EXPECT_SAME(flat(net->parameters()), before);
        EXPECT_GT((flat(copy->parameters()) - before).abs().max().item<double>(), 1e-6);
      }
      auto first = flat(net->parameters());
      broadcast(first, {.src = 0});
      EXPECT_SAME(first, flat(net->parameters()));

      // A module cloned on all ranks can be wrapped again.
      CopiedNet again(std::dynamic_pointer_cast<CopiedNetImpl>(net->clone()));
      DistributedDataParallel<CopiedNet> other(again);
      for (auto* each : {&model, &other}) {
        each->module()->zero_grad();
        (*each)(rows_of(rank, 5)).square().mean().backward();
      }
      EXPECT_SAME(again->layer->weight.grad(), net->layer->weight.grad());
    });
}

// spec: M2 a model whose units are sharded says that it is not cloned
TEST(ModuleCopies, OfShardedUnitsAreRefused) {
  on_ranks(2, [](int) {
    nn::Sequential net(nn::Linear(4, 3), nn::Linear(3, 2));
    FullyShardedDataParallel<nn::Sequential> model(
        net, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
    EXPECT_HAS(
        message_of<DistError>([&] { net->clone(); }),
        "FullyShardedDataParallel: a Sequential of which elements are sharded is not cloned");
  });
}

}  // namespace
}  // namespace muster::testing::copies
