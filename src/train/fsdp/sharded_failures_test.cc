// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <stdexcept>

#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

/// A node whose backward throws on one rank.
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool really) {
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
    const std::int64_t whole = fragile->linear->weight.numel();
    FullyShardedDataParallel<Fragile> model(fragile);
    const auto loss = model(share(inputs(), rank, 3)).sum();
    if (rank == 1) {
      EXPECT_HAS(message_of<std::runtime_error>([&] { loss.backward(); }), "no gradient today");
    } else {
      EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "rank 1");
    }
    EXPECT_LT(fragile->linear->weight.numel(), whole);  // and can be inspected
    EXPECT_HAS(message_of<DistError>([&] { model(share(inputs(), rank, 3)); }), "cannot go on");
  });
}

struct TwoUnitsImpl : nn::Module {
  explicit TwoUnitsImpl(const Options& options) {
    first = register_module("first", nn::Linear(5, 5));
    second = register_module("second", nn::Linear(5, 5));
    to(at::kDouble);
    one = std::make_unique<FullyShardedDataParallel<nn::Linear>>(fully_shard(first, options));
    two = std::make_unique<FullyShardedDataParallel<nn::Linear>>(fully_shard(second, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    return swapped ? (*one)((*two)(x)) : (*two)((*one)(x));
  }
  nn::Linear first{nullptr}, second{nullptr};
  std::unique_ptr<FullyShardedDataParallel<nn::Linear>> one, two;
  bool swapped = false;
};
TORCH_MODULE(TwoUnits);

// spec: M6.order ranks that run units of the same sizes in another order get an error in that
// forward, in training and in evaluation, whatever is kept or gathered ahead
TEST(ShardedFailures, UnitsInAnotherOrderAreRefusedInForward) {
  const std::vector<Options> variants{
      {}, {.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP}, {.forward_prefetch = true}};
  for (const Options& options : variants)
    for (const bool trains : {true, false})
      on_ranks(3, [&](int rank) {
        const at::AutoGradMode mode(trains);
        TwoUnits model(options);
        const auto x = share(inputs(), rank, 3);
        model(x);
        model->swapped = rank == 1;
        const auto text = message_of<DistError>([&] { model(x); });
        EXPECT_HAS(text, "rank 1");
        EXPECT_HAS(text, "must make the same calls in the same order");
      });
}

// spec: M6.order replicas of hybrid sharding: units in another order on one row of ranks get theirs
// from their own row, so every output is right, and backward, which all take part in, says so
TEST(ShardedFailures, ReplicasInAnotherOrderAreRefusedInBackward) {
  on_ranks(4, [](int rank) {
    Options options{.sharding_strategy = ShardingStrategy::HYBRID_SHARD};
    options.device_mesh = init_device_mesh("cpu", {2, 2});
    TwoUnits model(options);
    const auto x = share(inputs(), rank, 4);
    model->swapped = rank >= 2;
    const auto text = message_of<DistError>([&] { model(x).sum().backward(); });
    EXPECT_HAS(text, "must make the same calls in the same order");
  });
}

TEST(ShardedFailures, OtherModulesOnOtherRanksAreRefusedOnAll) {
  on_ranks(2, [&](int rank) {
    const auto text = message_of<DistError>([&] { fully_shard(nn::Linear(3, 4 + rank)); });
    EXPECT_HAS(text, "FullyShardedDataParallel");
    EXPECT_HAS(text, "weight [5, 3]");
    EXPECT_HAS(message_of<DistError>([&] {
                 fully_shard(nn::Linear(3, 4),
                             {.sharding_strategy = rank == 0 ? ShardingStrategy::FULL_SHARD
                                                             : ShardingStrategy::SHARD_GRAD_OP});
               }),
               "reshard_after_forward");
    struct Buffered : nn::Module {
      explicit Buffered(int rank) { register_buffer("table", torch::zeros({3 + rank})); }
      at::Tensor forward(const at::Tensor& x) { return x; }
    };
    EXPECT_HAS(message_of<DistError>([&] { fully_shard(std::make_shared<Buffered>(rank)); }),
               "table [4]");
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
    EXPECT_HAS(message_of<DistError>([&] { model(share(inputs(), rank, 2)); }),
               "was given other memory");
    const auto loss = loss_of(other(share(inputs(), rank, 2)), share(targets(), rank, 2));
    EXPECT_HAS(message_of<DistError>([&] { loss.backward({}, true, /*create_graph=*/true); }),
               "create_graph");
    const auto later = loss_of(third(share(inputs(), rank, 2)), share(targets(), rank, 2));
    const auto full = third.summon_full_params();
    EXPECT_HAS(message_of<DistError>([&] { later.backward(); }), "summoned");
  });
}

// A gradient that arrives while its parameter is sharded would not be averaged.
TEST(ShardedFailures, AParameterUsedOutsideOfItsForwardIsNamed) {
  on_ranks(2, [&](int) {
    Net net = net_of(1);
    FullyShardedDataParallel<Net> model(net);
    at::Tensor kept;
    {
      const auto full = model.summon_full_params();
      kept = net->first->weight * 2;
    }
    EXPECT_HAS(message_of<DistError>([&] { kept.sum().backward(); }),
               "'first.weight' came while it was sharded");
  });
}

/// Modifies its input, or returns its own parameter.
struct RudeImpl : nn::Module {
  RudeImpl() : weight(register_parameter("weight", torch::ones({5}, at::kDouble))) {}
  at::Tensor forward(at::Tensor x, bool in_place) {
    return in_place ? x.mul_(2) * weight : weight.narrow(0, 0, x.size(0));
  }
  at::Tensor weight;
};
TORCH_MODULE(Rude);

TEST(ShardedFailures, WhatForwardMayNotDoIsSaid) {
  on_ranks(2, [&](int) {
    Rude rude;
    FullyShardedDataParallel<Rude> model(rude);
    const auto x = torch::ones({5}, at::dtype(at::kDouble).requires_grad(true)) * 1;
    EXPECT_HAS(message_of<DistError>([&] { model(x, true); }), "in place");
    EXPECT_LT(rude->weight.numel(), 5);
    EXPECT_HAS(message_of<DistError>([&] { model(torch::ones({3}), false); }), "clone()");
    EXPECT_EQ(model.unsharded_bytes(), 0);
    model(torch::ones({5}, at::kDouble), true)
        .sum()
        .backward();  // allowed for tensors that require no gradient
    EXPECT_TRUE(rude->weight.grad().defined());
  });
}

// A failure aborts the calls of existing models; a model created afterwards works.
TEST(ShardedFailures, AModelMadeAfterAFailureWorks) {
  on_ranks(2, [&](int rank) {
    Fragile fragile;
    fragile->throws = true;
    FullyShardedDataParallel<Fragile> model(fragile);
    const auto loss = model(share(inputs(), rank, 2)).sum();
    EXPECT_HAS(message_of<std::runtime_error>([&] { loss.backward(); }), "no gradient today");
    FullyShardedDataParallel<Net> next(net_of(1));
    loss_of(next(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    EXPECT_TRUE(next.module()->first->weight.grad().defined());
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
