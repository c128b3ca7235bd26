// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_unit.h"

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

class ShardedMemory : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedMemory, ::testing::Values(1, 2, 3, 4));

// spec: M1 parameters, gradients and optimizer state are sharded; M3 memory per rank falls as 1/n
TEST_P(ShardedMemory, KeepsItsShareOfAllThatIsKept) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    Net net;
    std::int64_t all = 0;
    for (const auto& parameter : net->parameters()) all += parameter.numel();
    FullyShardedDataParallel<Net> model(net, kVariants[1]);
    EXPECT_EQ(model.units(), 3u);
    torch::optim::Adam optimizer(net->parameters());
    const auto held = [&] {
      std::int64_t elements = 0;
      for (const auto& parameter : net->parameters()) elements += parameter.numel();
      return elements;
    };
    const auto everywhere = [](std::int64_t mine) {
      auto sum = torch::tensor({mine});
      all_reduce(sum);
      return sum.item<std::int64_t>();
    };
    EXPECT_EQ(everywhere(held()), all);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss_of(model(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
      optimizer.step();
    }
    EXPECT_EQ(everywhere(held()), all);
    std::int64_t gradients = 0, state = 0;
    for (const auto& parameter : net->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
      gradients += parameter.grad().numel();
      const auto& of = static_cast<torch::optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      state += of.exp_avg().numel();
    }
    EXPECT_EQ(everywhere(gradients), all);
    EXPECT_EQ(everywhere(state), all);
  });
}

// spec: M3 memory per rank falls as 1/n: bytes of parameters, of gradients and of the optimizer's
// state between two passes
TEST_P(ShardedMemory, HoldsOneNthOfTheBytes) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int) {
    nn::Sequential layers;
    for (int i = 0; i < 4; ++i) layers->push_back(nn::Linear(96, 96));
    const std::int64_t all = 4 * (96 * 96 + 96) * 4;
    FullyShardedDataParallel<nn::Sequential> model(
        layers, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
    torch::optim::Adam optimizer(layers->parameters());
    model(torch::ones({2, 96})).square().sum().backward();
    optimizer.step();
    // Actual memory, not only the visible tensors.
    std::map<const void*, std::int64_t> parameters, gradients;
    std::int64_t state = 0;
    for (const auto& parameter : layers->parameters()) {
      const auto count = [](std::map<const void*, std::int64_t>& found, const at::Tensor& tensor) {
        found[tensor.storage().unsafeGetStorageImpl()] =
            static_cast<std::int64_t>(tensor.storage().nbytes());
      };
      count(parameters, parameter);
      count(gradients, parameter.grad());
      const auto& of = static_cast<torch::optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      state += static_cast<std::int64_t>(of.exp_avg().storage().nbytes() +
                                         of.exp_avg_sq().storage().nbytes());
    }
    const auto sum = [](const std::map<const void*, std::int64_t>& found) {
      std::int64_t bytes = 0;
      for (const auto& [storage, size] : found) bytes += size;
      return bytes;
    };
    const double share = static_cast<double>(all) / ranks;
    EXPECT_NEAR(static_cast<double>(sum(parameters)), share, 0.02 * share);
    EXPECT_NEAR(static_cast<double>(sum(gradients)), share, 0.02 * share);
    EXPECT_NEAR(static_cast<double>(state), 2 * share, 0.02 * 2 * share);
    EXPECT_EQ(model.unsharded_bytes(), 0);
  });
}

// spec: M1 forward: all-gather, compute, free
TEST(ShardedForward, GivesBackWhatItHasGathered) {
  on_ranks(2, [&](int rank) {
    Net net = net_of(1);
    FullyShardedDataParallel<Net> model(net, {});
    const auto before = net->first->weight.sizes().vec();
    EXPECT_EQ(before, (std::vector<std::int64_t>{rank == 0 ? 4 : 3, 5}));
    const auto out = model(share(inputs(), rank, 2));
    EXPECT_EQ(net->first->weight.sizes(), before);
    const torch::NoGradGuard no_grad;
    EXPECT_LT(difference(model(inputs()), net_of(1)(inputs())), 1e-12);
    EXPECT_EQ(net->first->weight.sizes(), before);
  });
}

/// Units that are members of a module.
struct OuterImpl : nn::Module {
  OuterImpl()
      : first(register_module("first", nn::Linear(5, 6))),
        second(register_module("second", nn::Linear(6, 3))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto middle = torch::tanh(unit != nullptr ? (*unit)(x) : first(x));
    return second(middle);
  }
  nn::Linear first, second;
  std::unique_ptr<FullyShardedDataParallel<nn::Linear>> unit;
};
TORCH_MODULE(Outer);

// spec: M1 units nest
// spec: M4 fully_shard
TEST(ShardedUnits, MayBeMembersOfAModule) {
  on_ranks(2, [&](int rank) {
    Outer alone, outer;
    fill(*alone, 3);
    fill(*outer, 3);
    outer->unit = std::make_unique<FullyShardedDataParallel<nn::Linear>>(fully_shard(outer->first));
    auto model = fully_shard(outer);
    EXPECT_EQ(model.units(), 2u);
    torch::optim::SGD mine(outer->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      mine.zero_grad();
      theirs.zero_grad();
      loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
      loss_of(alone(inputs()), targets()).backward();
      mine.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
  });
}

/// A layer whose forward inspects its weight, before and after use.
struct WatchedImpl : nn::Module {
  WatchedImpl() : linear(register_module("linear", nn::Linear(6, 6))) { to(at::kDouble); }
  at::Tensor forward(const at::Tensor& x) {
    seen.push_back(linear->weight.sizes().vec());
    const auto y = linear(x);
    if (y.requires_grad())
      y.register_hook([this](const at::Tensor&) { seen.push_back(linear->weight.sizes().vec()); });
    return torch::tanh(y);
  }
  nn::Linear linear;
  std::vector<std::vector<std::int64_t>> seen;
};
TORCH_MODULE(Watched);

// spec: M1 forward: all-gather, compute, free; backward: all-gather, compute, reduce-scatter, free
TEST(ShardedUnits, AreWholeWhileTheyAreNeeded) {
  on_ranks(2, [&](int) {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP}) {
      Watched first, second;
      nn::Sequential both(first, second);
      FullyShardedDataParallel<nn::Sequential> model(
          both,
          {.auto_wrap_policy = module_wrap_policy<WatchedImpl>(), .sharding_strategy = strategy});
      ASSERT_EQ(model.units(), 3u);
      // The graph's reference to a weight uses this memory; its size tells whether it is allocated.
      const auto expect_given_back = [&](const char* when) {
        EXPECT_EQ(model.unsharded_bytes(), 0) << when;
        for (const auto& each : {first, second}) EXPECT_EQ(each->linear->weight.size(0), 3) << when;
      };
      expect_given_back("before");
      {
        const torch::NoGradGuard no_grad;
        model.forward(inputs().view({-1, 6}));
      }
      expect_given_back("without a graph");
      first->seen.clear();
      second->seen.clear();
      const auto out = model.forward(inputs().view({-1, 6}));
      if (strategy == ShardingStrategy::FULL_SHARD) {
        expect_given_back("after forward");
      } else {
        EXPECT_GE(model.unsharded_bytes(), 2 * (36 + 6) * 8);
      }
      out.square().mean().backward();
      expect_given_back("after backward");
      const std::vector<std::vector<std::int64_t>> expected{{6, 6}, {6, 6}};
      EXPECT_EQ(first->seen, expected);
      EXPECT_EQ(second->seen, expected);
    }
  });
}

/// The maximum memory of all units while `model` runs forward and backward, sampled after each
/// layer.
struct CountedImpl : nn::Module {
  explicit CountedImpl(std::int64_t width)
      : linear(register_module("linear", nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    look();
    const auto y = linear(x);
    y.register_hook([this](const at::Tensor&) { look(); });
    return torch::tanh(y);
  }
  nn::Linear linear;
  std::function<void()> look;
};
TORCH_MODULE(Counted);

// spec: M1 a rank holds one unit whole at a time
TEST(ShardedUnits, AreWholeOneAfterTheOther) {
  on_ranks(2, [&](int) {
    nn::Sequential layers;
    for (int i = 0; i < 6; ++i) layers->push_back(Counted(64));
    FullyShardedDataParallel<nn::Sequential> model(
        layers,
        {.auto_wrap_policy = module_wrap_policy<CountedImpl>(), .backward_prefetch = std::nullopt});
    std::int64_t most = 0, looks = 0;
    for (const auto& each : model.module()->children())
      if (auto* counted = each->as<CountedImpl>())
        counted->look = [&] {
          most = std::max(most, model.unsharded_bytes());
          ++looks;
        };
    const std::int64_t one = (64 * 64 + 64) * 4;
    model.forward(torch::ones({3, 64}, torch::requires_grad())).sum().backward();
    EXPECT_EQ(looks, 12);
    EXPECT_GE(most, one);
    EXPECT_LT(most, 2 * one);
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
