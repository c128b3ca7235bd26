// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/scratch_folder.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;

struct TwoLayersImpl : nn::Module {
  explicit TwoLayersImpl(int seed)
      : first(register_module("first", nn::Linear(4, 6))),
        last(register_module("last", nn::Linear(6, 2))) {
    const torch::NoGradGuard no_grad;
    int salt = seed;
    for (auto& each : parameters())
      each.copy_(
          torch::sin(torch::arange(each.numel(), at::kFloat) * 0.7 + ++salt).view(each.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x))); }
  nn::Linear first, last;
};
TORCH_MODULE(TwoLayers);

void train(DistributedDataParallel<TwoLayers>& model, torch::optim::Optimizer& optimizer, int begin,
           int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    model(torch::cos(torch::arange(12, at::kFloat) * (get_rank() + 1.5) + step).view({3, 4}))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
}

class Checkpoint : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Checkpoint, ::testing::Values(1, 2, 4));

// spec: K5 rank 0 saves, barrier, the others load with a device map
TEST_P(Checkpoint, OfRank0IsWhereAllGoOn) {
  const ScratchFolder folder;
  const auto path = folder.file("checkpoint.pt");
  on_ranks(GetParam(), [&](int rank) {
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    TwoLayers net(1);
    DistributedDataParallel<TwoLayers> model(net);
    torch::optim::SGD optimizer(net->parameters(), options);
    train(model, optimizer, 0, 3);
    if (rank == 0) {
      torch::serialize::OutputArchive archive, of_net, of_optimizer;
      net->save(of_net);
      optimizer.save(of_optimizer);
      archive.write("net", of_net);
      archive.write("optimizer", of_optimizer);
      archive.save_to(path);
    }
    barrier();  // no rank reads before it is written
    const auto saved = flat(net->parameters());
    train(model, optimizer, 3, 6);

    TwoLayers other(50 + rank);
    DistributedDataParallel<TwoLayers> resumed(other);
    torch::optim::SGD other_optimizer(other->parameters(), options);
    torch::serialize::InputArchive archive, of_net, of_optimizer;
    archive.load_from(path, torch::Device(torch::kCPU));  // the device map: whatever device rank 0
                                                          // saved from, load to this rank's own
    archive.read("net", of_net);
    archive.read("optimizer", of_optimizer);
    EXPECT_FALSE(torch::equal(flat(other->parameters()), saved));
    other->load(of_net);
    other_optimizer.load(of_optimizer);
    EXPECT_SAME(flat(other->parameters()), saved);
    for (const auto& each : other->parameters()) EXPECT_TRUE(each.device().is_cpu());
    train(resumed, other_optimizer, 3, 6);
    EXPECT_SAME(flat(other->parameters()), flat(net->parameters()));
    EXPECT_FALSE(torch::equal(flat(other->parameters()), saved));
  });
}

}  // namespace
}  // namespace muster::testing
