// SPDX-License-Identifier: BSD-3-Clause
#include "muster/fully_sharded_data_parallel.h"

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

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

at::Tensor trained_together(int rank, int ranks, int steps, const Options& options) {
  Net net = net_of(1 + static_cast<std::uint64_t>(rank));  // rank 0's values are used
  FullyShardedDataParallel<Net> model(net, options);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
    optimizer.step();
  }
  return whole(model);
}

class Sharded : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sharded, ::testing::Values(1, 2, 3, 4));

// spec: M1 forward gathers and frees, backward gathers, reduce-scatters and frees; auto_wrap_policy
// chooses the units; M3 the same parameters as one process
TEST_P(Sharded, TrainsAsOneProcessOnTheWholeBatch) {
  const int ranks = GetParam();
  const auto alone = trained_alone(10);
  for (std::size_t i = 0; i < kVariants.size(); ++i)
    on_ranks(ranks, [&](int rank) {
      EXPECT_LT(difference(trained_together(rank, ranks, 10, kVariants[i]), alone), 1e-9)
          << "variant " << i;
    });
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
      const auto expected =
          loss_of(replicated(share(inputs(), rank, 2)), share(targets(), rank, 2));
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      loss.backward();
      expected.backward();
      mine.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(sharded), flat(other->parameters())), 1e-12);
  });
}

// Sums of several passes, with and without no_sync. The optimizer's zero_grad does not reach
// pending sums; drop_gradients does.
TEST(ShardedTraining, GradientsAddUp) {
  on_ranks(2, [&](int rank) {
    Net alone = net_of(1);
    loss_of(alone(inputs()), targets()).backward();
    loss_of(alone(inputs() * 2), targets()).backward();
    for (const bool sync : {true, false}) {
      Net net = net_of(1);
      FullyShardedDataParallel<Net> model(net, kVariants[1]);
      const auto add = [&](double factor) {
        loss_of(model(share(inputs() * factor, rank, 2)), share(targets(), rank, 2)).backward();
      };
      {
        const auto local = model.no_sync();
        add(7);
        EXPECT_FALSE(net->first->weight.grad().defined());
      }
      model.drop_gradients();
      if (sync) {
        add(1);
      } else {
        const auto local = model.no_sync();
        add(1);
      }
      add(2);
      torch::optim::SGD ours(net->parameters(), 0.1), theirs(alone->parameters(), 0.1);
      ours.step();
      Net stepped = net_of(1);
      for (std::size_t i = 0; i < stepped->parameters().size(); ++i)
        stepped->parameters()[i].mutable_grad() = alone->parameters()[i].grad();
      torch::optim::SGD(stepped->parameters(), 0.1).step();
      EXPECT_LT(difference(whole(model), flat(stepped->parameters())), 1e-12) << sync;
    }
  });
}

// Sums from no_sync are averaged in the next pass, even if it does not reach the unit.
TEST(ShardedTraining, SumsOfUnitsThatAPassLeavesOutAreAveragedInIt) {
  on_ranks(2, [&](int rank) {
    nn::Linear left(3, 3), right(3, 3);
    FullyShardedDataParallel<nn::Linear> one(left), other(right);
    {
      const auto local = one.no_sync();
      one(torch::ones({1, 3}) * (rank + 1)).sum().backward();
    }
    other(torch::ones({1, 3})).sum().backward();
    const auto& gradient = left->bias.grad();
    ASSERT_TRUE(gradient.defined());
    EXPECT_SAME(gradient, torch::ones_like(gradient));
    auto sum = torch::zeros({1});
    if (left->weight.numel() > 0) sum += left->weight.grad().sum();
    all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), 9 * 1.5f);
  });
}

/// A rank may leave the second layer unused.
struct PartsImpl : nn::Module {
  PartsImpl()
      : always(register_module("always", nn::Linear(5, 5))),
        perhaps(register_module("perhaps", nn::Linear(5, 5))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(always(uses ? torch::tanh(perhaps(x)) : x));
  }
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
    FullyShardedDataParallel<nn::Sequential> model(
        nn::Sequential(mine[0], mine[1], mine[2]),
        {.auto_wrap_policy = module_wrap_policy<PartsImpl>()});
    nn::Sequential whole_model(alone[0], alone[1], alone[2]);
    torch::optim::SGD ours(model.module()->parameters(), 0.1),
        theirs(whole_model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      for (int other = 0; other < 3; ++other) {
        for (int i = 0; i < 3; ++i)
          alone[static_cast<std::size_t>(i)]->uses = (other + i + step) % 3 != 0;
        (whole_model->forward(share(inputs(), other, 3)).square().mean() / 3).backward();
      }
      for (int i = 0; i < 3; ++i)
        mine[static_cast<std::size_t>(i)]->uses = (rank + i + step) % 3 != 0;
      model(share(inputs(), rank, 3)).square().mean().backward();
      ours.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(model), flat(whole_model->parameters())), 1e-12);
  });
}

/// The same layer twice in a row, with another in between whose inputs require gradients.
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
        if (inputs_want_gradients)
          EXPECT_LT(difference(x.grad(), share(all.grad(), rank, 2) * 2), 1e-12);
        ours.step();
        theirs.step();
      }
      EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
    }
  });
}

/// Calls its own unit recursively.
struct InwardImpl : nn::Module {
  InwardImpl() : layer(register_module("layer", nn::Linear(5, 5))) { to(at::kDouble); }
  at::Tensor forward(const at::Tensor& x, int deeper) {
    const auto y = torch::tanh(layer(x));
    return deeper == 0 ? y : layer(again ? again(y) : forward(y, deeper - 1));
  }
  nn::Linear layer;
  std::function<at::Tensor(const at::Tensor&)> again;
};
TORCH_MODULE(Inward);

TEST(ShardedTraining, AUnitMayCallItself) {
  on_ranks(2, [&](int rank) {
    Inward mine, alone;
    fill(*mine, 5);
    fill(*alone, 5);
    FullyShardedDataParallel<Inward> model(mine);
    mine->again = [&](const at::Tensor& y) { return model(y, 0); };
    torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      model(share(inputs(), rank, 2), 1).square().mean().backward();
      alone(inputs(), 1).square().mean().backward();
      EXPECT_EQ(model.unsharded_bytes(), 0);
      ours.step();
      theirs.step();
    }
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
    mine->again = {};
  });
}

// A graph keeps the values it needs.
TEST(ShardedTraining, TheModelMayGoBeforeItsBackward) {
  on_ranks(2, [&](int rank) {
    Net alone = net_of(1), mine = net_of(1);
    at::Tensor loss;
    {
      FullyShardedDataParallel<Net> model(mine);
      loss = loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2));
    }
    loss.backward();
    loss_of(alone(inputs()), targets()).backward();
    auto sum = torch::zeros({1}, at::kDouble), expected = torch::zeros({1}, at::kDouble);
    for (const auto& each : mine->parameters()) sum += each.grad().sum();
    for (const auto& each : alone->parameters()) expected += each.grad().sum();
    all_reduce(sum);
    EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-9);
  });
}

// Conjugate views, as autograd produces them.
TEST(ShardedTraining, ComplexParameters) {
  struct TurnImpl : nn::Module {
    TurnImpl() {
      weight = register_parameter("weight",
                                  torch::complex(torch::arange(1., 5.), torch::arange(2., 6.)));
    }
    at::Tensor forward(const at::Tensor& x) { return torch::imag(weight.conj() * x); }
    at::Tensor weight;
  };
  on_ranks(2, [&](int rank) {
    const auto x = torch::complex(torch::arange(4.) + rank, torch::ones({4}));
    const auto alone = std::make_shared<TurnImpl>(), mine = std::make_shared<TurnImpl>();
    FullyShardedDataParallel<std::shared_ptr<TurnImpl>> model(mine);
    model(x).sum().backward();
    const auto all = torch::complex(torch::arange(4.) + 0.5, torch::ones({4}));
    alone->forward(all).sum().backward();
    torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    ours.step();
    theirs.step();
    EXPECT_LT(torch::abs(whole(model) - alone->weight.detach()).max().item<float>(), 1e-6);
  });
}

// Gradients are divided in the dtype of the reduction.
TEST(ShardedTraining, SmallGradientsSurviveTheDivision) {
  on_ranks(3, [&](int) {
    Typed net;
    net->to(at::kFloat);
    FullyShardedDataParallel<Typed> model(
        net,
        {.mixed_precision = MixedPrecision{.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
    (model(torch::ones({1, 5})).to(at::kFloat) * 3e-7).sum().backward();
    const auto& gradient = net->linear->bias.grad();
    if (gradient.numel() > 0) EXPECT_NEAR(gradient[0].item<float>(), at::Half(3e-7f) + 0.f, 1e-12);
  });
}

// A retained graph may be traversed again; gradients accumulate.
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
    FullyShardedDataParallel<nn::Sequential> model(
        mine, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
    EXPECT_EQ(model.units(), 3u);
    torch::optim::SGD ours(mine->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    model(share(inputs(), rank, 2)).square().mean().backward();
    alone->forward(inputs()).square().mean().backward();
    ours.step();
    theirs.step();
    EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-12);
  });
}

// Frozen parameters are sharded too. A parameter with fewer elements than ranks leaves some ranks
// without elements.
TEST(ShardedTraining, FrozenAndSmallParameters) {
  on_ranks(4, [&](int rank) {
    Net mine = net_of(1), alone = net_of(1);
    for (const auto& net : {mine, alone})
      for (auto& parameter : net->first->parameters()) parameter.requires_grad_(false);
    FullyShardedDataParallel<Net> model(mine, kVariants[1]);
    auto elements = torch::tensor({mine->first->weight.numel()});
    all_reduce(elements);
    EXPECT_EQ(elements.item<std::int64_t>(), 5 * 7);
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

TEST(ShardedTraining, MayComputeInANarrowerType) {
  on_ranks(2, [&](int rank) {
    const auto x = share(inputs().to(at::kFloat), rank, 2);
    for (const auto reduce : {at::kFloat, at::kBFloat16}) {
      Typed mine, alone;
      fill(*mine, 4);
      fill(*alone, 4);
      FullyShardedDataParallel<Typed> model(
          mine, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16,
                                                   .reduce_dtype = reduce,
                                                   .buffer_dtype = at::kBFloat16}});
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

TEST(ShardedTraining, GradientsAreClippedByTheNormOfAllRanks) {
  on_ranks(3, [&](int rank) {
    Net alone = net_of(1);
    loss_of(alone(inputs()), targets()).backward();
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const double expected =
          torch::linalg_vector_norm(flat([&] {
                                      std::vector<at::Tensor> all;
                                      for (const auto& each : alone->parameters())
                                        all.push_back(each.grad());
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
