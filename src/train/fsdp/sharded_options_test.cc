// SPDX-License-Identifier: BSD-3-Clause
// Every option of FullyShardedDataParallel trains what one process trains, and keeps what it says.

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/device_mesh.h"
#include "muster/subgroups.h"
#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

struct Variant {
  const char* name;
  int ranks;
  Options options;
  std::vector<int> mesh = {};
};

Options blocks(ShardingStrategy strategy) {
  return {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>(), .sharding_strategy = strategy};
}
template <class Change>
Options changed(Change change) {
  Options options = blocks(ShardingStrategy::FULL_SHARD);
  change(options);
  return options;
}

std::vector<Variant> variants() {
  using enum ShardingStrategy;
  return {
      {"no shard", 3, blocks(NO_SHARD)},
      {"no shard, one unit", 2, {.sharding_strategy = NO_SHARD}},
      {"hybrid 2x2", 4, blocks(HYBRID_SHARD), {2, 2}},
      {"hybrid 2x1", 2, blocks(HYBRID_SHARD), {2, 1}},
      {"hybrid 1x3", 3, blocks(HYBRID_SHARD), {1, 3}},
      {"hybrid 2x2, kept until backward", 4, blocks(HYBRID_SHARD_ZERO2), {2, 2}},
      {"resharded to 2 of 4", 4, changed([](Options& each) { each.reshard_after_forward = 2; })},
      {"resharded to 1 of 2", 2, changed([](Options& each) { each.reshard_after_forward = 1; })},
      {"resharded to 3 of 3", 3, changed([](Options& each) { each.reshard_after_forward = 3; })},
      {"hybrid 1x4, resharded to 2",
       4,
       changed([](Options& each) {
         each.sharding_strategy = HYBRID_SHARD;
         each.reshard_after_forward = 2;
       }),
       {1, 4}},
      {"no prefetch", 2, changed([](Options& each) { each.backward_prefetch = {}; })},
      {"late prefetch", 3,
       changed([](Options& each) { each.backward_prefetch = BackwardPrefetch::BACKWARD_POST; })},
      {"forward prefetch", 3, changed([](Options& each) { each.forward_prefetch = true; })},
      {"offloaded", 2, changed([](Options& each) { each.cpu_offload = true; })},
  };
}

struct LossesAndParameters {
  std::vector<double> losses;
  at::Tensor parameters;
};

// spec: T5 hybrid sharding over a two-dimensional mesh, NO_SHARD, CPU offload, prefetch,
// reshard_after_forward as int: the losses and parameters of one process
TEST(ShardedOptions, TrainAsOneProcess) {
  LossesAndParameters alone;
  {
    Net net = net_of(1);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      const auto loss = loss_of(net(inputs()), targets());
      alone.losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
    }
    alone.parameters = flat(net->parameters());
  }
  for (const Variant& variant : variants())
    on_ranks(variant.ranks, [&](int rank) {
      Options options = variant.options;
      if (!variant.mesh.empty()) options.device_mesh = init_device_mesh("cpu", variant.mesh);
      Net net = net_of(1 + static_cast<std::uint64_t>(rank));  // rank 0's values are used
      FullyShardedDataParallel<Net> model(net, options);
      torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
      for (const double expected : alone.losses) {
        optimizer.zero_grad();
        const auto loss = loss_of(model(share(inputs(), rank, variant.ranks)),
                                  share(targets(), rank, variant.ranks));
        auto mean = loss.detach().clone();
        all_reduce(mean, {.op = ReduceOp::AVG});
        EXPECT_NEAR(mean.item<double>(), expected, 1e-9) << variant.name;
        loss.backward();
        optimizer.step();
        EXPECT_EQ(model.memory().gathered, 0) << variant.name;
      }
      EXPECT_LT(difference(whole(model), alone.parameters), 1e-9) << variant.name;
      EXPECT_NEAR(model.clip_grad_norm_(1e9), model.clip_grad_norm_(1e9), 1e-12) << variant.name;
    });
}

// spec: T5 gradients accumulate and are clipped alike with hybrid sharding and NO_SHARD
TEST(ShardedOptions, ClipAndAccumulateAsOneProcess) {
  Net alone = net_of(1);
  loss_of(alone(inputs()), targets()).backward();
  loss_of(alone(inputs() * 2), targets()).backward();
  const double norm = torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.01);
  torch::optim::SGD(alone->parameters(), 1).step();
  for (const bool hybrid : {true, false})
    on_ranks(4, [&](int rank) {
      using enum ShardingStrategy;
      Options options = blocks(hybrid ? HYBRID_SHARD : NO_SHARD);
      if (hybrid) options.device_mesh = init_device_mesh("cpu", {2, 2});
      Net net = net_of(1);
      FullyShardedDataParallel<Net> model(net, options);
      {
        const auto local = model.no_sync();
        loss_of(model(share(inputs(), rank, 4)), share(targets(), rank, 4)).backward();
      }
      loss_of(model(share(inputs() * 2, rank, 4)), share(targets(), rank, 4)).backward();
      EXPECT_NEAR(model.clip_grad_norm_(0.01), norm, 1e-9);
      torch::optim::SGD(net->parameters(), 1).step();
      EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-9);
    });
}

/// A model whose first layer is a unit with options of its own.
struct TwoPartsImpl : nn::Module {
  TwoPartsImpl()
      : first(register_module("first", nn::Linear(5, 6))),
        last(register_module("last", nn::Linear(6, 3))) {
    to(at::kDouble);
    fill(*this, 4);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(unit.module() ? unit(x) : first(x)));
  }
  nn::Linear first, last;
  FullyShardedDataParallel<nn::Linear> unit{nullptr};
};
TORCH_MODULE(TwoParts);

/// Options of one unit, over a mesh of 2 x 2 ranks where they are hybrid.
Options unit_of(ShardingStrategy strategy) {
  Options options{.sharding_strategy = strategy};
  if (strategy == ShardingStrategy::HYBRID_SHARD)
    options.device_mesh = init_device_mesh("cpu", {2, 2});
  return options;
}

// spec: M6.norms a parameter counts once in the norm, whether its unit is full, hybrid or not
// sharded, so all ranks clip by one factor
TEST(ShardedOptions, ClipUnitsOfDifferentGroupsByOneNorm) {
  using enum ShardingStrategy;
  constexpr auto kInfinite = std::numeric_limits<double>::infinity();
  for (const double type : {2.0, 3.0, kInfinite}) {
    TwoParts alone;
    loss_of(alone(inputs()), targets()).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.01, type);
    torch::optim::SGD(alone->parameters(), 1).step();
    for (const auto& strategies : {std::pair{FULL_SHARD, NO_SHARD},
                                   {NO_SHARD, FULL_SHARD},
                                   {FULL_SHARD, HYBRID_SHARD},
                                   {HYBRID_SHARD, FULL_SHARD},
                                   {HYBRID_SHARD, NO_SHARD},
                                   {NO_SHARD, HYBRID_SHARD}})
      on_ranks(4, [&](int rank) {
        TwoParts net;
        net->unit = fully_shard(net->first, unit_of(strategies.second));
        FullyShardedDataParallel<TwoParts> model(net, unit_of(strategies.first));
        loss_of(model(share(inputs(), rank, 4)), share(targets(), rank, 4)).backward();
        const double mine = model.clip_grad_norm_(0.01, type);
        EXPECT_NEAR(mine, norm, 1e-9 * norm);
        const at::Tensor seen = torch::empty({4}, at::kDouble);
        all_gather_into_tensor(seen, torch::tensor({mine}, at::kDouble));
        EXPECT_TRUE((seen == mine).all().item<bool>());  // bit for bit
        torch::optim::SGD(net->parameters(), 1).step();
        EXPECT_LT(difference(whole(model), flat(alone->parameters())), 1e-9);
      });
  }
}

// spec: M6.norms or it is refused on every rank: units that lie on different ranks have no norm of
// all
TEST(ShardedOptions, RefuseTheNormOfUnitsOnDifferentRanks) {
  on_ranks(4, [](int rank) {
    const auto half = new_group({.ranks = rank < 2 ? std::vector{0, 1} : std::vector{2, 3},
                                 .use_local_synchronization = true});
    TwoParts net;
    net->unit = fully_shard(net->first, {.process_group = half});
    FullyShardedDataParallel<TwoParts> model(net);
    loss_of(model(share(inputs(), rank, 4)), share(targets(), rank, 4)).backward();
    const auto text = message_of<DistError>([&] { model.clip_grad_norm_(1); });
    EXPECT_HAS(text, "units lie on different ranks");
    EXPECT_HAS(text, "ranks 0, 1, 2, 3");
  });
}

// spec: T5 hybrid sharding over a two-dimensional mesh: 1/n of the rows' ranks; NO_SHARD: all
TEST(ShardedOptions, KeepTheirShare) {
  on_ranks(4, [](int) {
    using enum ShardingStrategy;
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const std::int64_t all = 2 * (64 * 64 + 64) * 4;
    for (const auto& [strategy, ranks] :
         {std::pair{FULL_SHARD, 4}, {HYBRID_SHARD, 2}, {NO_SHARD, 1}}) {
      nn::Sequential layers(nn::Linear(64, 64), nn::Linear(64, 64));
      Options options = blocks(strategy);
      if (strategy == HYBRID_SHARD) options.device_mesh = mesh;
      FullyShardedDataParallel<nn::Sequential> model(layers, options);
      model.reset_peak_memory();
      model.forward(torch::ones({2, 64})).sum().backward();
      const auto memory = model.memory();
      EXPECT_NEAR(static_cast<double>(memory.parameters), static_cast<double>(all / ranks), 256);
      EXPECT_NEAR(static_cast<double>(memory.gradients), static_cast<double>(all / ranks), 256);
      EXPECT_GT(memory.gathered_peak, 0);
      EXPECT_GT(memory.staging_peak, all / 2);
    }
  });
}

// spec: T5 reshard_after_forward as int: between forward and backward each rank keeps its part
TEST(ShardedOptions, KeepPartsBetweenForwardAndBackward) {
  on_ranks(4, [](int) {
    nn::Sequential layers(nn::Linear(64, 64), nn::Linear(64, 64));
    Options options = blocks(ShardingStrategy::FULL_SHARD);
    options.reshard_after_forward = 2;
    FullyShardedDataParallel<nn::Sequential> model(layers, options);
    const auto out = model.forward(torch::ones({2, 64}));
    const std::int64_t all = 2 * (64 * 64 + 64) * 4;
    EXPECT_NEAR(static_cast<double>(model.memory().gathered), static_cast<double>(all / 2), 512);
    out.sum().backward();
    EXPECT_EQ(model.memory().gathered, 0);
    options.reshard_after_forward = 3;
    nn::Sequential other(nn::Linear(4, 4));
    EXPECT_HAS(
        message_of<DistError>([&] { FullyShardedDataParallel<nn::Sequential>(other, options); }),
        "does not divide");
  });
}

// spec: T5 the ranks of both dimensions compare their modules
TEST(ShardedOptions, DifferencesBetweenReplicasThrowOnAllRanks) {
  on_ranks(4, [](int rank) {
    Options options{.sharding_strategy = ShardingStrategy::HYBRID_SHARD};
    options.device_mesh = init_device_mesh("cpu", {2, 2});
    nn::Linear linear(rank == 3 ? 5 : 4, 3);
    EXPECT_THROW(FullyShardedDataParallel<nn::Linear>(linear, options), DistError);
    EXPECT_THROW(FullyShardedDataParallel<nn::Linear>(
                     linear, {.sharding_strategy = ShardingStrategy::HYBRID_SHARD}),
                 DistError);
  });
}

/// A block with another signature than elements of Sequentials have.
struct ScaledImpl : nn::Module {
  explicit ScaledImpl(int width) : linear(register_module("linear", nn::Linear(width, width))) {
    to(at::kDouble);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, double factor) {
    seen = linear->weight.size(0);
    const auto y = torch::tanh(linear(x)) * factor;
    return {y, y.square()};
  }
  nn::Linear linear;
  std::int64_t seen = 0;
};

struct AnyPlaceImpl : nn::Module {
  AnyPlaceImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("frozen", frozen);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto [y, squares] = second(first(frozen(x), 0.5).first, 2.0);
    return y + squares;
  }
  Shardable<ScaledImpl> first{5}, second{5};
  nn::Linear frozen{5, 5};
};
TORCH_MODULE(AnyPlace);

// spec: T5 C++: policies on any module, ignored modules
TEST(ShardedOptions, PoliciesSelectModulesAtAnyPlace) {
  AnyPlace alone;
  fill(*alone, 3);
  loss_of(alone(inputs()).narrow(1, 0, 3), targets()).backward();
  on_ranks(2, [&](int rank) {
    AnyPlace net;
    fill(*net, 3);
    Options options{.auto_wrap_policy = module_wrap_policy<ScaledImpl>()};
    options.ignored_modules = {net->frozen.ptr()};
    FullyShardedDataParallel<AnyPlace> model(net, options);
    EXPECT_EQ(model.units(), 3u);
    EXPECT_EQ(net->first->linear->weight.size(0), rank == 0 ? 3 : 2);
    EXPECT_EQ(net->frozen->weight.size(0), 5);
    loss_of(model(share(inputs(), rank, 2)).narrow(1, 0, 3), share(targets(), rank, 2)).backward();
    EXPECT_EQ(net->first->seen, 5);
    EXPECT_EQ(net->first->linear->weight.size(0), rank == 0 ? 3 : 2);
    // Nobody averages what is ignored.
    all_reduce(net->frozen->weight.grad(), {.op = ReduceOp::AVG});
    EXPECT_LT(difference(net->frozen->weight.grad(), alone->frozen->weight.grad()), 1e-12);
    const double norm = model.clip_grad_norm_(1e9);
    double expected = 0;
    for (const auto& each : {alone->first, alone->second})
      for (const auto& parameter : each->parameters())
        expected += parameter.grad().square().sum().item<double>();
    EXPECT_NEAR(norm, std::sqrt(expected), 1e-9);
    const auto state = model.state_dict(/*rank0_only=*/false);
    EXPECT_EQ(state.size(), net->named_parameters().size());
    model.load_state_dict(state);
  });
}

// spec: T5 meta-device initialisation with param_init_fn: the values of rank 0's function, one unit
// after the other
TEST(ShardedOptions, GiveValuesToMetaModules) {
  on_ranks(2, [](int rank) {
    Net net;
    drop_values(*net);
    ASSERT_TRUE(net->first->weight.is_meta());
    Options options = blocks(ShardingStrategy::FULL_SHARD);
    std::int64_t most = 0;
    int calls = 0;
    options.param_init_fn = [&](nn::Module& module) {
      std::int64_t here = 0;
      const auto parameters = net->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (!parameters[i].is_meta() && parameters[i].dim() == 2 &&
            parameters[i].sizes() == net_of(1)->parameters()[i].sizes())
          here += parameters[i].numel();
      most = std::max(most, here);
      ++calls;
      for (auto& each : module.named_parameters(/*recurse=*/false))
        each.value().fill_(rank == 0 ? static_cast<double>(each.value().numel()) : -1);
    };
    FullyShardedDataParallel<Net> model(net, options);
    EXPECT_EQ(calls, 5);  // four layers and the outer module
    EXPECT_EQ(most, 63);  // the largest weight: never two of them
    const auto values = whole(model);
    std::vector<at::Tensor> expected;
    for (const auto& item : net_of(1)->parameters())
      expected.push_back(torch::full_like(item, static_cast<double>(item.numel())));
    EXPECT_SAME(values, flat(expected));
    loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    EXPECT_TRUE(net->first->weight.grad().defined());
  });
}

// spec: M5 meta initialisation without param_init_fn: NaN where nothing was set, so that it shows;
// then each rank sets its rows, or loads them
TEST(ShardedOptions, GiveNaNToMetaModulesWithoutAFunction) {
  on_ranks(3, [](int rank) {
    Typed net, alone;
    fill(*alone, 5);
    drop_values(*net);
    FullyShardedDataParallel<Typed> model(net);
    const at::Tensor x = inputs().to(at::kFloat);
    EXPECT_TRUE(model(x).isnan().all().item<bool>());
    EXPECT_TRUE(net->linear->weight.is_cpu());
    EXPECT_TRUE(net->mean.isnan().all().item<bool>());
    {
      const torch::NoGradGuard no_grad;
      const auto mine = alone->linear->weight.chunk(3);
      const auto row = static_cast<std::size_t>(rank);
      if (row < mine.size()) net->linear->weight.copy_(mine[row]);
      const auto bias = alone->linear->bias.chunk(3);
      if (row < bias.size()) net->linear->bias.copy_(bias[row]);
      net->mean.copy_(alone->mean);
    }
    EXPECT_LT(difference(model(x), alone(x)), 1e-6);
    Typed other;
    drop_values(*other);
    FullyShardedDataParallel<Typed> loaded(other);
    loaded.load_state_dict(model.state_dict(/*rank0_only=*/false));
    EXPECT_SAME(loaded(x), model(x));
  });
}

// spec: M5 another dimension than the first
TEST(ShardedOptions, DivideAlongTheDimensionThatIsChosen) {
  Net alone = net_of(1);
  loss_of(alone(inputs()), targets()).backward();
  on_ranks(2, [&](int rank) {
    Net net = net_of(1);
    Options options{.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()};
    options.shard_placement_fn = [](const at::Tensor& parameter) -> std::optional<std::int64_t> {
      if (parameter.dim() == 2) return -1;
      return {};
    };
    FullyShardedDataParallel<Net> model(net, options);
    EXPECT_EQ(net->first->weight.sizes().vec(), (std::vector<std::int64_t>{7, rank == 0 ? 3 : 2}));
    EXPECT_EQ(net->first->bias.size(0), rank == 0 ? 4 : 3);
    loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    const auto mine = alone->first->weight.grad().chunk(2, 1)[static_cast<std::size_t>(rank)];
    EXPECT_LT(difference(net->first->weight.grad(), mine), 1e-12);
    EXPECT_SAME(whole(model), flat(net_of(1)->parameters()));
    options.shard_placement_fn = [](const at::Tensor&) { return 2; };
    EXPECT_HAS(message_of<DistError>([&] { FullyShardedDataParallel<Net>(net_of(1), options); }),
               "along dimension 2");
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
