#include "muster/parallel/fully_sharded_data_parallel.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/group/test_ranks.h"
#include "muster/parallel.h"
#include "muster/testing/thrown.h"

namespace muster::testing::fsdp {
namespace {

namespace nn = torch::nn;
using Options = FullyShardedDataParallelOptions;

constexpr std::int64_t kSamples = 24;

void fill(nn::Module& module, std::uint64_t salt) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    const auto numbers = torch::arange(parameter.numel(), at::kDouble) + static_cast<double>(++salt * 17);
    parameter.copy_((torch::sin(numbers * 12.9898) * 0.5).view(parameter.sizes()));
  }
}

/// Blocks in a Sequential, and parameters outside of it; sizes that no number of ranks divides.
struct NetImpl : nn::Module {
  NetImpl()
      : first(register_module("first", nn::Linear(5, 7))),
        blocks(register_module("blocks", nn::Sequential(nn::Linear(7, 9), nn::Tanh(), nn::Linear(9, 7), nn::Tanh()))),
        last(register_module("last", nn::Linear(7, 3))),
        scale(register_parameter("scale", torch::ones({}))) {
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return last(blocks->forward(torch::tanh(first(x)))) * scale; }
  nn::Linear first;
  nn::Sequential blocks;
  nn::Linear last;
  at::Tensor scale;
};
TORCH_MODULE(Net);

Net net_of(std::uint64_t seed) {
  Net net;
  fill(*net, seed);
  return net;
}

at::Tensor inputs() { return torch::sin(torch::arange(kSamples * 5, at::kDouble) * 1.7).view({kSamples, 5}); }
at::Tensor targets() { return torch::cos(torch::arange(kSamples * 3, at::kDouble) * 0.9).view({kSamples, 3}); }
at::Tensor share(const at::Tensor& all, int rank, int ranks) { return all.chunk(ranks)[static_cast<std::size_t>(rank)]; }
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) { return (output - target).square().mean(); }
double difference(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

at::Tensor trained_alone(int steps) {
  Net net = net_of(1);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(net(inputs()), targets()).backward();
    optimizer.step();
  }
  return flat(net->parameters());
}

/// All parameters, on every rank.
template <class Model>
at::Tensor whole(Model& model) {
  const auto full = model.summon_full_params(false);
  return flat(model.module()->parameters()).clone();
}

at::Tensor trained_together(int rank, int ranks, int steps, const Options& options) {
  Net net = net_of(1 + static_cast<std::uint64_t>(rank));  // rank 0's counts
  FullyShardedDataParallel<Net> model(net, options);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
    optimizer.step();
  }
  return whole(model);
}

const std::vector<Options> kVariants{
    {},
    {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()},
    {.auto_wrap_policy = size_based_auto_wrap_policy(72)},
    {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>(), .sharding_strategy = ShardingStrategy::SHARD_GRAD_OP},
};

class Sharded : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sharded, ::testing::Values(1, 2, 3, 4));

// spec: M1 forward gathers and frees, backward gathers, reduce-scatters and frees; auto_wrap_policy chooses the units
// spec: M3 the same parameters as one process
TEST_P(Sharded, TrainsAsOneProcessOnTheWholeBatch) {
  const int ranks = GetParam();
  const auto alone = trained_alone(10);
  for (std::size_t i = 0; i < kVariants.size(); ++i)
    on_ranks(ranks,
             [&](int rank) { EXPECT_LT(difference(trained_together(rank, ranks, 10, kVariants[i]), alone), 1e-9) << "variant " << i; });
}

// spec: M3 the same losses and parameters as DDP
TEST(ShardedTraining, IsThatOfDistributedDataParallel) {
  on_ranks(2, [&](int rank) {
    Net net = net_of(1), other = net_of(1);
    FullyShardedDataParallel<Net> sharded(net, kVariants[1]);
    DistributedDataParallel<Net> replicated(other);
    torch::optim::SGD mine(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD theirs(other->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      mine.zero_grad();
      theirs.zero_grad();
      const auto loss = loss_of(sharded(share(inputs(), rank, 2)), share(targets(), rank, 2));
      const auto expected = loss_of(replicated(share(inputs(), rank, 2)), share(targets(), rank, 2));
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      loss.backward();
      expected.backward();
      mine.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(sharded), flat(other->parameters())), 1e-12);
  });
}

// spec: M1 parameters, gradients and optimizer state are sharded; M3 memory per rank falls as 1/n
TEST_P(Sharded, KeepsItsShareOfAllThatIsKept) {
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
      const auto& of = static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      state += of.exp_avg().numel();
    }
    EXPECT_EQ(everywhere(gradients), all);
    EXPECT_EQ(everywhere(state), all);
  });
}

// spec: M3 memory per rank falls as 1/n: bytes of parameters, of gradients and of the optimizer's state between two passes
TEST_P(Sharded, HoldsOneNthOfTheBytes) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int) {
    nn::Sequential layers;
    for (int i = 0; i < 4; ++i) layers->push_back(nn::Linear(96, 96));
    const std::int64_t all = 4 * (96 * 96 + 96) * 4;
    FullyShardedDataParallel<nn::Sequential> model(layers, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
    torch::optim::Adam optimizer(layers->parameters());
    model(torch::ones({2, 96})).square().sum().backward();
    optimizer.step();
    // What memory there is, and not only what is seen of it.
    std::map<const void*, std::int64_t> parameters, gradients;
    std::int64_t state = 0;
    for (const auto& parameter : layers->parameters()) {
      const auto count = [](std::map<const void*, std::int64_t>& found, const at::Tensor& tensor) {
        found[tensor.storage().unsafeGetStorageImpl()] = static_cast<std::int64_t>(tensor.storage().nbytes());
      };
      count(parameters, parameter);
      count(gradients, parameter.grad());
      const auto& of = static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      state += static_cast<std::int64_t>(of.exp_avg().storage().nbytes() + of.exp_avg_sq().storage().nbytes());
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
    EXPECT_EQ(net->first->weight.dim(), 1);
    const auto out = model(share(inputs(), rank, 2));
    EXPECT_EQ(net->first->weight.sizes(), before);
    const torch::NoGradGuard no_grad;
    EXPECT_LT(difference(model(inputs()), net_of(1)(inputs())), 1e-12);
    EXPECT_EQ(net->first->weight.sizes(), before);
  });
}

/// Units that are members of a module.
struct OuterImpl : nn::Module {
  OuterImpl() : first(register_module("first", nn::Linear(5, 6))), second(register_module("second", nn::Linear(6, 3))) { to(at::kDouble); }
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

// spec: M2 state_dict called on every rank gives the full one on rank 0, and a sharded form; loading reshards
TEST_P(Sharded, StateComesWholeAndInShards) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    FullyShardedDataParallel<Net> model(net_of(1), kVariants[1]);
    const StateDict full = model.state_dict();
    EXPECT_EQ(full.empty(), rank != 0);
    const StateDict everywhere = model.state_dict(/*rank0_only=*/false);
    Net expected = net_of(1);
    ASSERT_EQ(everywhere.size(), expected->parameters().size());
    for (std::size_t i = 0; i < everywhere.size(); ++i) {
      const auto item = expected->named_parameters()[i];
      EXPECT_EQ(everywhere[i].first, item.key());
      EXPECT_SAME(everywhere[i].second, item.value().detach());
      if (rank == 0) EXPECT_SAME(full[i].second, item.value().detach());
    }
    FullyShardedDataParallel<Net> other(net_of(7), {});  // other units
    other.load_state_dict(everywhere);
    EXPECT_SAME(whole(other), whole(model));
    FullyShardedDataParallel<Net> third(net_of(9), kVariants[1]);
    third.load_sharded_state_dict(model.sharded_state_dict());
    EXPECT_SAME(whole(third), whole(model));
  });
}

TEST(ShardedState, WhatDoesNotFitIsNamed) {
  on_ranks(2, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(1), {});
    StateDict state = model.state_dict(false);
    state.emplace_back("more", torch::zeros({1}));
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), "'more'");
    state.pop_back();
    state.back().second = torch::zeros({2, 2}, at::kDouble);
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), state.back().first);
    state.pop_back();
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), "is not in the state");
  });
}

TEST(ShardedState, SummonedParametersCanBeSavedLoadedAndChanged) {
  on_ranks(2, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(1), kVariants[1]), other(net_of(5), kVariants[1]);
    std::stringstream file;
    {
      const auto full = model.summon_full_params(false);
      torch::save(model.module(), file);
    }
    {
      const auto full = other.summon_full_params();
      torch::load(other.module(), file);
    }
    EXPECT_SAME(whole(other), whole(model));
    {
      const auto full = other.summon_full_params(false);
      const torch::NoGradGuard no_grad;
      other.module()->first->weight.zero_();
    }
    EXPECT_SAME(whole(other), whole(model));
  });
}

TEST(ShardedTraining, GradientsAddUp) {
  on_ranks(2, [&](int rank) {
    Net alone = net_of(1);
    loss_of(alone(inputs()), targets()).backward();
    loss_of(alone(inputs() * 2), targets()).backward();
    for (const bool sync : {true, false}) {
      FullyShardedDataParallel<Net> model(net_of(1), kVariants[1]);
      {
        using NoSync = FullyShardedDataParallel<Net>::NoSync;
        const std::unique_ptr<NoSync> local(sync ? nullptr : new NoSync(model.no_sync()));
        loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
      }
      loss_of(model(share(inputs() * 2, rank, 2)), share(targets(), rank, 2)).backward();
      double norm = 0;
      for (const auto& parameter : alone->parameters()) norm += parameter.grad().square().sum().item<double>();
      EXPECT_NEAR(model.clip_grad_norm_(1e9), std::sqrt(norm), 1e-6 * std::sqrt(norm));
    }
  });
}

/// A layer for whose weight forward asks, before and behind it.
struct WatchedImpl : nn::Module {
  WatchedImpl() : linear(register_module("linear", nn::Linear(6, 6))) { to(at::kDouble); }
  at::Tensor forward(const at::Tensor& x) {
    seen.push_back(linear->weight.sizes().vec());
    const auto y = linear(x);
    if (y.requires_grad()) y.register_hook([this](const at::Tensor&) { seen.push_back(linear->weight.sizes().vec()); });
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
          both, {.auto_wrap_policy = module_wrap_policy<WatchedImpl>(), .sharding_strategy = strategy});
      ASSERT_EQ(model.units(), 3u);
      // What a graph keeps of a weight is in this memory, whose size says whether it is there.
      const auto expect_given_back = [&](const char* when) {
        EXPECT_EQ(model.unsharded_bytes(), 0) << when;
        for (const auto& each : {first, second}) EXPECT_EQ(each->linear->weight.dim(), 1) << when;
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

/// The most that the units together hold while `model` runs forward and backward, looked at wherever a layer is done.
struct CountedImpl : nn::Module {
  explicit CountedImpl(std::int64_t width) : linear(register_module("linear", nn::Linear(width, width))) {}
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
    FullyShardedDataParallel<nn::Sequential> model(layers, {.auto_wrap_policy = module_wrap_policy<CountedImpl>()});
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

/// Of whose second layer a rank may make no use.
struct PartsImpl : nn::Module {
  PartsImpl() : always(register_module("always", nn::Linear(5, 5))), perhaps(register_module("perhaps", nn::Linear(5, 5))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(always(uses ? torch::tanh(perhaps(x)) : x)); }
  nn::Linear always, perhaps;
  bool uses = true;
};
TORCH_MODULE(Parts);

// Parameters that only some ranks use count as zero on the others, and units stay in step.
TEST(ShardedTraining, RanksMayUseOtherParameters) {
  on_ranks(3, [&](int rank) {
    const auto make = [] {
      std::vector<Parts> parts{Parts(), Parts(), Parts()};
      for (std::uint64_t i = 0; i < 3; ++i) fill(*parts[i], i);
      return parts;
    };
    auto mine = make(), alone = make();
    FullyShardedDataParallel<nn::Sequential> model(nn::Sequential(mine[0], mine[1], mine[2]),
                                                   {.auto_wrap_policy = module_wrap_policy<PartsImpl>()});
    nn::Sequential whole_model(alone[0], alone[1], alone[2]);
    torch::optim::SGD ours(model.module()->parameters(), 0.1), theirs(whole_model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      for (int other = 0; other < 3; ++other) {
        for (int i = 0; i < 3; ++i) alone[static_cast<std::size_t>(i)]->uses = (other + i + step) % 3 != 0;
        (whole_model->forward(share(inputs(), other, 3)).square().mean() / 3).backward();
      }
      for (int i = 0; i < 3; ++i) mine[static_cast<std::size_t>(i)]->uses = (rank + i + step) % 3 != 0;
      model(share(inputs(), rank, 3)).square().mean().backward();
      ours.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(model), flat(whole_model->parameters())), 1e-12);
  });
}

/// The same layer twice in a row, and another in between whose inputs want gradients.
struct TwiceImpl : nn::Module {
  TwiceImpl() : layer(register_module("layer", nn::Linear(5, 5))) { to(at::kDouble); }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 3; ++i) x = torch::tanh(unit ? (*unit)(x) : layer(x));
    return x;
  }
  nn::Linear layer;
  std::optional<FullyShardedDataParallel<nn::Linear>> unit;
};
TORCH_MODULE(Twice);

TEST(ShardedTraining, AUnitMayRunSeveralTimesInAPass) {
  on_ranks(2, [&](int rank) {
    for (const bool inputs_want_gradients : {true, false}) {
      Twice mine, alone;
      fill(*mine, 2);
      fill(*alone, 2);
      mine->unit.emplace(mine->layer);
      FullyShardedDataParallel<Twice> model(mine);
      torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        ours.zero_grad();
        theirs.zero_grad();
        auto x = share(inputs(), rank, 2).clone().requires_grad_(inputs_want_gradients);
        auto all = inputs().clone().requires_grad_(inputs_want_gradients);
        model(x).square().mean().backward();
        alone(all).square().mean().backward();
        if (inputs_want_gradients) EXPECT_LT(difference(x.grad(), share(all.grad(), rank, 2) * 2), 1e-12);
        ours.step();
        theirs.step();
      }
      EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
    }
  });
}

// A graph may be kept and gone through again; gradients add up.
TEST(ShardedTraining, AGraphMayBeUsedTwice) {
  on_ranks(2, [&](int rank) {
    Net alone = net_of(1), mine = net_of(1);
    FullyShardedDataParallel<Net> model(mine, kVariants[1]);
    const auto expected = loss_of(alone(inputs()), targets());
    const auto loss = loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2));
    for (int pass = 0; pass < 2; ++pass) {
      expected.backward({}, pass == 0);
      loss.backward({}, pass == 0);
      EXPECT_EQ(model.unsharded_bytes(), 0);
    }
    torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    ours.step();
    theirs.step();
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
  });
}

TEST(ShardedTraining, AnElementMayStandInSeveralPlaces) {
  on_ranks(2, [&](int rank) {
    const auto make = [] {
      nn::Linear twice(5, 5), once(5, 5);
      nn::Sequential all(twice, nn::Tanh(), once, twice);
      all->to(at::kDouble);
      fill(*all, 6);
      return all;
    };
    nn::Sequential mine = make(), alone = make();
    FullyShardedDataParallel<nn::Sequential> model(mine, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
    EXPECT_EQ(model.units(), 3u);
    torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    model(share(inputs(), rank, 2)).square().mean().backward();
    alone->forward(inputs()).square().mean().backward();
    ours.step();
    theirs.step();
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
  });
}

// Frozen parameters are sharded too; parameters of fewer elements than there are ranks leave some of these without any.
TEST(ShardedTraining, FrozenAndSmallParameters) {
  on_ranks(4, [&](int rank) {
    Net mine = net_of(1), alone = net_of(1);
    for (const auto& net : {mine, alone})
      for (auto& parameter : net->first->parameters()) parameter.requires_grad_(false);
    FullyShardedDataParallel<Net> model(mine, kVariants[1]);
    EXPECT_LE(mine->first->weight.numel(), 5 * 7);
    torch::optim::Adam ours(mine->parameters(), 0.05), theirs(alone->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      loss_of(model(share(inputs(), rank, 4)), share(targets(), rank, 4)).backward();
      loss_of(alone(inputs()), targets()).backward();
      ours.step();
      theirs.step();
    }
    EXPECT_FALSE(mine->first->weight.grad().defined());
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-9);
    auto scales = torch::tensor({mine->scale.numel()});
    all_reduce(scales);
    EXPECT_EQ(scales.item<std::int64_t>(), 1);
  });
}

/// What a layer computes in.
struct TypedImpl : nn::Module {
  TypedImpl() : linear(register_module("linear", nn::Linear(5, 4))), mean(register_buffer("mean", torch::ones({4}))) {}
  at::Tensor forward(const at::Tensor& x) {
    types = {x.scalar_type(), linear->weight.scalar_type(), mean.scalar_type()};
    return linear(x) + mean;
  }
  nn::Linear linear;
  at::Tensor mean;
  std::vector<at::ScalarType> types;
};
TORCH_MODULE(Typed);

TEST(ShardedTraining, MayComputeInANarrowerType) {
  on_ranks(2, [&](int rank) {
    const auto x = share(inputs().to(at::kFloat), rank, 2);
    for (const auto reduce : {at::kFloat, at::kBFloat16}) {
      Typed mine, alone;
      fill(*mine, 4);
      fill(*alone, 4);
      FullyShardedDataParallel<Typed> model(
          mine, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = reduce, .buffer_dtype = at::kBFloat16}});
      torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        ours.zero_grad();
        theirs.zero_grad();
        const auto out = model(x);
        EXPECT_EQ(mine->types, std::vector(3, at::kBFloat16));
        out.to(at::kFloat).square().mean().backward();
        alone(inputs().to(at::kFloat)).square().mean().backward();
        EXPECT_EQ(mine->linear->weight.grad().scalar_type(), at::kFloat);
        EXPECT_EQ(mine->linear->weight.scalar_type(), at::kFloat);
        ours.step();
        theirs.step();
      }
      EXPECT_LT(difference(whole(model), flat(alone->parameters())), 0.02);
    }
  });
}

/// A node whose backward throws on one rank.
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool really) {
    context->saved_data["really"] = really;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (context->saved_data["really"].toBool()) throw std::runtime_error("no gradient today");
    return {gradients[0], {}};
  }
};
struct FragileImpl : nn::Module {
  FragileImpl() : linear(register_module("linear", nn::Linear(5, 5))) { to(at::kDouble); }
  at::Tensor forward(const at::Tensor& x) { return linear(Throws::apply(linear(x), throws)); }
  nn::Linear linear;
  bool throws = false;
};
TORCH_MODULE(Fragile);

TEST(ShardedFailures, AnExceptionInBackwardReachesTheOthers) {
  on_ranks(3, [&](int rank) {
    Fragile fragile;
    fragile->throws = rank == 1;
    FullyShardedDataParallel<Fragile> model(fragile);
    const auto loss = model(share(inputs(), rank, 3)).sum();
    if (rank == 1) {
      EXPECT_HAS(message_of<std::runtime_error>([&] { loss.backward(); }), "no gradient today");
    } else {
      EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "rank 1");
    }
    EXPECT_EQ(fragile->linear->weight.dim(), 1);  // and can be looked at
    EXPECT_HAS(message_of<DistError>([&] { model(share(inputs(), rank, 3)); }), "cannot go on");
  });
}

TEST(ShardedFailures, OtherModulesOnOtherRanksAreRefusedOnAll) {
  on_ranks(2, [&](int rank) {
    const auto text = message_of<DistError>([&] { fully_shard(nn::Linear(3, 4 + rank)); });
    EXPECT_HAS(text, "FullyShardedDataParallel");
    EXPECT_HAS(text, "weight [5, 3]");
    EXPECT_HAS(message_of<DistError>([&] {
                 fully_shard(nn::Linear(3, 4),
                             {.sharding_strategy = rank == 0 ? ShardingStrategy::FULL_SHARD : ShardingStrategy::SHARD_GRAD_OP});
               }),
               "reshard_after_forward");
  });
}

TEST(ShardedFailures, WhatCannotBeIsSaid) {
  on_ranks(2, [&](int) {
    nn::Linear inner(5, 5);
    const auto unit = fully_shard(inner);
    EXPECT_HAS(message_of<DistError>([&] { fully_shard(inner); }), "sharded already");
    nn::Linear shares(5, 5);
    shares->weight = shares->register_parameter("other", inner->weight);
    EXPECT_HAS(message_of<DistError>([&] { fully_shard(shares); }), "another unit");
    auto model = fully_shard(nn::Linear(5, 5));
    const auto full = model.summon_full_params();
    EXPECT_HAS(message_of<DistError>([&] { model(torch::ones({1, 5})); }), "summoned");
    EXPECT_HAS(message_of<DistError>([&] { (void)model.summon_full_params(); }), "not sharded now");
  });
}

TEST(ShardedFailures, WhatWouldGoWrongUnseenIsRefused) {
  on_ranks(2, [&](int rank) {
    FullyShardedDataParallel<Net> model(net_of(1)), other(net_of(2)), third(net_of(3));
    model.module()->to(at::kFloat);
    EXPECT_HAS(message_of<DistError>([&] { model(share(inputs(), rank, 2)); }), "was given other memory");
    const auto loss = loss_of(other(share(inputs(), rank, 2)), share(targets(), rank, 2));
    EXPECT_HAS(message_of<DistError>([&] { loss.backward({}, true, /*create_graph=*/true); }), "create_graph");
    const auto later = loss_of(third(share(inputs(), rank, 2)), share(targets(), rank, 2));
    const auto full = third.summon_full_params();
    EXPECT_HAS(message_of<DistError>([&] { later.backward(); }), "summoned");
  });
}

// A gradient that comes while its parameter is sharded would not be averaged.
TEST(ShardedFailures, AParameterUsedOutsideOfItsForwardIsNamed) {
  on_ranks(2, [&](int) {
    Net net = net_of(1);
    FullyShardedDataParallel<Net> model(net);
    at::Tensor kept;
    {
      const auto full = model.summon_full_params();
      kept = net->first->weight * 2;
    }
    EXPECT_HAS(message_of<DistError>([&] { kept.sum().backward(); }), "'first.weight' came while it was sharded");
  });
}

// Rank 0's values, buffers too, are everybody's where sync_module_states is on; else each rank has its shard of its own.
TEST(ShardedState, ComesFromRankZeroWhereAskedFor) {
  on_ranks(2, [&](int rank) {
    Typed synced, own;
    for (const auto& each : {synced, own}) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : each->parameters()) parameter.fill_(rank + 1);
      each->mean.fill_(rank + 5);
    }
    FullyShardedDataParallel<Typed> first(synced), second(own, {.sync_module_states = false});
    EXPECT_SAME(whole(first), torch::ones({24}));
    EXPECT_SAME(synced->mean, torch::full({4}, 5.f));
    EXPECT_EQ(whole(second).min().item<float>(), 1);
    EXPECT_EQ(whole(second).max().item<float>(), 2);
    EXPECT_SAME(own->mean, torch::full({4}, rank + 5.f));
    const StateDict state = first.state_dict(false);
    EXPECT_EQ(state.back().first, "mean");
    EXPECT_SAME(state.back().second, torch::full({4}, 5.f));
  });
}

// spec: M2 loading reshards: what 2 ranks saved, 3 ranks load
TEST(ShardedState, GoesToAnotherNumberOfRanks) {
  std::stringstream file;
  on_ranks(2, [&](int rank) {
    FullyShardedDataParallel<Net> model(net_of(3), kVariants[1]);
    const StateDict state = model.state_dict();
    if (rank != 0) return;
    torch::serialize::OutputArchive archive;
    for (const auto& [name, tensor] : state) archive.write(name, tensor);
    archive.save_to(file);
  });
  const std::string saved = file.str();
  on_ranks(3, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(8));
    std::istringstream from(saved);
    torch::serialize::InputArchive archive;
    archive.load_from(from);
    StateDict state;
    for (const auto& item : net_of(8)->named_parameters()) {
      at::Tensor value;
      archive.read(item.key(), value);
      state.emplace_back(item.key(), value);
    }
    model.load_state_dict(state);
    EXPECT_SAME(whole(model), flat(net_of(3)->parameters()));
  });
}

TEST(ShardedTraining, GradientsAreClippedByTheNormOfAllRanks) {
  on_ranks(3, [&](int rank) {
    Net alone = net_of(1);
    loss_of(alone(inputs()), targets()).backward();
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const double expected = torch::linalg_vector_norm(flat([&] {
                                                          std::vector<at::Tensor> all;
                                                          for (const auto& each : alone->parameters()) all.push_back(each.grad());
                                                          return all;
                                                        }()),
                                                        type)
                                  .item<double>();
      Net net = net_of(1);
      FullyShardedDataParallel<Net> model(net, kVariants[1]);
      loss_of(model(share(inputs(), rank, 3)), share(targets(), rank, 3)).backward();
      EXPECT_NEAR(model.clip_grad_norm_(expected / 2, type), expected, 1e-6 * expected);
      EXPECT_NEAR(model.clip_grad_norm_(expected, type), expected / 2, 1e-5 * expected);
    }
    auto model = fully_shard(nn::Linear(2, 2));
    EXPECT_HAS(message_of<DistError>([&] { model.clip_grad_norm_(1, -1); }), "norm_type");
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
