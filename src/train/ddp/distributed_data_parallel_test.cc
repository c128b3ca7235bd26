// SPDX-License-Identifier: BSD-3-Clause
#include "muster/distributed_data_parallel.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <sys/wait.h>

#include <csignal>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"
#include "train/ddp/testing/relative_difference.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

constexpr std::int64_t kSamples = 24;

/// Two layers, one of which may be unused, and a shared one.
struct NetImpl : nn::Module {
  explicit NetImpl(at::ScalarType dtype = at::kDouble)
      : in(register_module("in", nn::Linear(5, 8))),
        side(register_module("side", nn::Linear(8, 8))),
        out(register_module("out", nn::Linear(8, 3))) {
    to(dtype);
  }
  at::Tensor forward(at::Tensor x, bool uses_side = true) {
    x = torch::tanh(in(x));
    if (uses_side) x = torch::tanh(side(torch::tanh(side(x))));
    return out(x);
  }
  nn::Linear in, side, out;
};
TORCH_MODULE(Net);

Net net_of(std::uint64_t seed, at::ScalarType dtype = at::kDouble) {
  // Ranks as threads share one generator, so values are set explicitly.
  Net net(dtype);
  const torch::NoGradGuard no_grad;
  std::uint64_t salt = seed;
  for (auto& parameter : net->parameters()) {
    const auto numbers =
        torch::arange(parameter.numel(), at::kDouble) + static_cast<double>(++salt * 17);
    parameter.copy_((torch::sin(numbers * 12.9898) * 0.5).view(parameter.sizes()).to(dtype));
  }
  return net;
}

at::Tensor inputs(at::ScalarType dtype = at::kDouble) {
  return torch::sin(torch::arange(kSamples * 5, at::kDouble) * 1.7).view({kSamples, 5}).to(dtype);
}
at::Tensor targets(at::ScalarType dtype = at::kDouble) {
  return torch::cos(torch::arange(kSamples * 3, at::kDouble) * 0.9).view({kSamples, 3}).to(dtype);
}
at::Tensor share(const at::Tensor& all, int rank, int ranks) {
  return all.chunk(ranks)[static_cast<std::size_t>(rank)];
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

/// Twenty steps on the whole batch in one process.
at::Tensor trained_alone(int steps, at::ScalarType dtype = at::kDouble, bool uses_side = true) {
  Net net = net_of(1, dtype);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(net(inputs(dtype), uses_side), targets(dtype)).backward();
    optimizer.step();
  }
  return flat(net->parameters());
}

at::Tensor trained_together(
    int rank, int ranks, int steps, const Options& options, bool uses_side = true,
    const std::function<void(DistributedDataParallel<Net>&)>& prepare = {}) {
  Net net = net_of(1 + static_cast<std::uint64_t>(rank));  // rank 0's values are used
  DistributedDataParallel<Net> model(net, options);
  if (prepare) prepare(model);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model(share(inputs(), rank, ranks), uses_side), share(targets(), rank, ranks))
        .backward();
    optimizer.step();
  }
  return flat(net->parameters());
}

class Training : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Training, ::testing::Values(1, 2, 3, 4));

// spec: K2.average gradients are averaged; any optimizer works as it does locally
TEST_P(Training, MatchesOneProcessOnTheWholeBatch) {
  const int ranks = GetParam();
  const auto alone = trained_alone(20);
  on_ranks(ranks, [&](int rank) {
    const auto together = trained_together(rank, ranks, 20, {});
    EXPECT_LT(testing::relative_difference(together, alone), 1e-12);
    auto zero = together.clone();
    broadcast(zero, {.src = 0});
    EXPECT_SAME(zero, together);
  });
}

// spec: K1.gradient_as_bucket_view bucket_cap_mb, gradient_as_bucket_view, find_unused_parameters,
// static_graph
TEST_P(Training, IsTheSameWithEveryOption) {
  const int ranks = GetParam();
  const auto alone = trained_alone(6);
  const std::vector<Options> variants{
      {.bucket_cap_mb = 0.0001},
      {.gradient_as_bucket_view = true},
      {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true},
      {.find_unused_parameters = true},
      {.bucket_cap_mb = 0.0001, .find_unused_parameters = true},
      {.static_graph = true},
      {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true, .static_graph = true},
  };
  for (std::size_t i = 0; i < variants.size(); ++i) {
    on_ranks(ranks, [&](int rank) {
      EXPECT_LT(testing::relative_difference(trained_together(rank, ranks, 6, variants[i]), alone),
                1e-12)
          << "variant " << i;
    });
  }
}

// spec: K3 find_unused_parameters counts missing gradients as zero
TEST(UnusedParameters, AreFoundAndLeftAlone) {
  const auto alone = trained_alone(6, at::kDouble, false);
  on_ranks(2, [&](int rank) {
    EXPECT_LT(testing::relative_difference(
                  trained_together(rank, 2, 6, {.find_unused_parameters = true}, false), alone),
              1e-12);
    EXPECT_LT(testing::relative_difference(
                  trained_together(rank, 2, 6, {.static_graph = true}, false), alone),
              1e-12);
  });
}

// spec: K3 used on some ranks only
TEST(UnusedParameters, CountAsZeroWhereAnotherRankUsesThem) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net, {.find_unused_parameters = true});
    loss_of(model(share(inputs(), rank, 2), rank == 0), share(targets(), rank, 2)).backward();
    Net reference = net_of(1);
    loss_of(reference(share(inputs(), 0, 2), true), share(targets(), 0, 2)).backward();
    EXPECT_LT(
        testing::relative_difference(net->side->weight.grad() * 2, reference->side->weight.grad()),
        1e-12);
  });
}

// spec: K3 every output must feed the loss otherwise
// spec: H5 unused-parameter errors name the parameters and their indices
// spec: H11 the end of the text
TEST(UnusedParameters, AreNamedWhereNobodyLooksForThem) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net);
    loss_of(model(share(inputs(), rank, 2), false), share(targets(), rank, 2)).backward();
    const auto text = message_of<DistError>([&] { model(share(inputs(), rank, 2), false); });
    const auto number = std::to_string(rank);
    EXPECT_HAS(text, "Expected to have finished reduction in the prior iteration");
    EXPECT_HAS(text, "Parameters which did not receive grad for rank " + number +
                         ": side.weight, side.bias\n");
    EXPECT_HAS(text, "Parameter indices which did not receive grad for rank " + number + ": 2 3");
  });
}

// spec: K2.state rank 0's state goes to all at construction
TEST(Construction, SendsParametersAndBuffersOfRank0) {
  on_ranks(3, [](int rank) {
    nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(rank + 1.5);
      for (auto& buffer : net->buffers()) buffer.fill_(rank + 7);
    }
    const DistributedDataParallel<nn::Sequential> model(net);
    for (const auto& parameter : net->parameters())
      EXPECT_TRUE(parameter.eq(1.5).all().item<bool>());
    for (const auto& buffer : net->buffers()) EXPECT_TRUE(buffer.eq(7).all().item<bool>());
  });
}

// A second forward pass updates buffers that the first pass's graph holds.
TEST(Buffers, MayTravelBetweenAForwardPassAndItsBackward) {
  on_ranks(2, [](int rank) {
    nn::Sequential net(nn::Linear(3, 3), nn::BatchNorm1d(3));
    net[1]->eval();
    DistributedDataParallel<nn::Sequential> model(net);
    const auto once = model.forward(torch::full({4, 3}, rank + 1.0)),
               again = model.forward(torch::full({4, 3}, rank + 2.0));
    (once + again).sum().backward();
    EXPECT_TRUE(net[1]->as<nn::BatchNorm1d>()->weight.grad().defined());
  });
}

// spec: K2.overlap overlapped: the first bucket travels while backward still makes the gradients of
// the last
TEST(Buckets, TravelDuringBackward) {
  on_ranks(2, [](int) {
    nn::Sequential net(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8));
    DistributedDataParallel<nn::Sequential> model(net, {.bucket_cap_mb = 0.0001});
    std::vector<bool> whole;  // for each bucket, whether all gradients had come when it started
    model.register_comm_hook([&](const GradBucket& bucket) {
      whole.push_back(net->parameters().front().grad().defined());
      return all_reduce_hook()(bucket);
    });
    for (int step = 0; step < 2; ++step) {
      whole.clear();
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      model.forward(torch::ones({2, 8})).sum().backward();
    }
    ASSERT_GE(whole.size(), 3U);
    EXPECT_FALSE(whole.front());
    EXPECT_TRUE(whole.back());
  });
}

// spec: K1.broadcast_buffers broadcast_buffers
TEST(Buffers, OfRank0GoToAllBeforeEachForward) {
  on_ranks(2, [](int rank) {
    for (const bool sends : {true, false}) {
      nn::Sequential net(nn::BatchNorm1d(3));
      DistributedDataParallel<nn::Sequential> model(net, {.broadcast_buffers = sends});
      for (int step = 0; step < 3; ++step)
        model.forward(torch::full({4, 3}, rank * 10.0)).sum().backward();
      // Running means move by a tenth towards the batch's; only the part since the last broadcast
      // may differ.
      const auto mine = net->buffers()[0];
      auto zero = mine.clone();
      broadcast(zero, {.src = 0});
      EXPECT_SAME(zero, torch::zeros({3}));
      const double expected = rank == 0 ? 0 : sends ? 1 : 10 * (1 - 0.9 * 0.9 * 0.9);
      EXPECT_LT((mine - expected).abs().max().item<double>(), 1e-5) << sends;
    }
  });
}

TEST(Construction, RefusesModulesThatDiffer) {
  on_ranks(3, [](int rank) {
    const auto text = message_of<DistError>(
        [&] { const DistributedDataParallel<nn::Linear> model(nn::Linear(4, rank == 2 ? 5 : 3)); });
    EXPECT_HAS(
        text,
        "'weight [3, 4] Float trained' on rank 0 and 'weight [5, 4] Float trained' on rank 2");
  });
}

// spec: K9 more than one id is an error; device_ids is None for CPU models
TEST(Construction, RefusesOptionsThatCannotBe) {
  on_ranks(1, [](int) {
    const auto made_with = [](const Options& options) {
      return message_of<DistError>(
          [&] { const DistributedDataParallel<nn::Linear> model(nn::Linear(2, 2), options); });
    };
    EXPECT_HAS(made_with({.device_ids = std::vector<int>{0, 1}}), "device_ids has 2 entries");
    EXPECT_HAS(made_with({.device_ids = std::vector<int>{0}}),
               "leave it out for modules on the CPU");
    EXPECT_HAS(made_with({.output_device = 1}), "output_device needs device_ids");
    EXPECT_HAS(made_with({.bucket_cap_mb = 0}), "bucket_cap_mb");
    nn::Linear frozen(2, 2);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    EXPECT_HAS(
        message_of<DistError>([&] { const DistributedDataParallel<nn::Linear> model(frozen); }),
        "no parameter that requires a gradient");
  });
}

// spec: K9 defaults
TEST(Construction, HasTorchsDefaults) {
  const Options options;
  EXPECT_FALSE(options.device_ids || options.output_device || options.process_group);
  EXPECT_EQ(options.dim, 0);
  EXPECT_TRUE(options.broadcast_buffers);
  EXPECT_EQ(options.bucket_cap_mb, 25);
  EXPECT_FALSE(options.find_unused_parameters || options.gradient_as_bucket_view ||
               options.static_graph);
}

// spec: K4.no_sync no_sync
TEST(NoSync, AddsUpLocallyUntilTheNextPass) {
  on_ranks(2, [](int rank) {
    for (const bool views : {false, true}) {
      Net net = net_of(1), reference = net_of(1);
      DistributedDataParallel<Net> model(
          net, {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = views});
      const auto x = inputs().chunk(6), y = targets().chunk(6);
      const auto step = [&](auto& m, std::size_t part) { loss_of(m(x[part]), y[part]).backward(); };
      const auto mine = static_cast<std::size_t>(rank) * 3;
      step(model, mine);
      net->zero_grad();
      {
        const auto local = model.no_sync();
        step(model, mine + 1);
        for (std::size_t part : {mine + 1}) step(reference, part);
        EXPECT_LT(
            testing::relative_difference(net->in->weight.grad(), reference->in->weight.grad()),
            1e-12)
            << "local only";
      }
      step(model, mine + 2);
      reference->zero_grad();
      for (const std::size_t part : {1, 2, 4, 5}) step(reference, part);
      EXPECT_LT(
          testing::relative_difference(net->in->weight.grad() * 2, reference->in->weight.grad()),
          1e-12);
      EXPECT_LT(
          testing::relative_difference(net->side->bias.grad() * 2, reference->side->bias.grad()),
          1e-12);
    }
  });
}

// spec: K4.hooks communication hooks all-reduce, fp16, bf16
TEST(CommHooks, AverageOrCompress) {
  const auto alone = trained_alone(5);
  on_ranks(2, [&](int rank) {
    const auto with = [&](const CommHook& hook) {
      return testing::relative_difference(
          trained_together(rank, 2, 5, {.bucket_cap_mb = 0.0001}, true,
                           [&](auto& model) { model.register_comm_hook(hook); }),
          alone);
    };
    EXPECT_LT(with(all_reduce_hook()), 1e-12);
    const double half = with(fp16_compress_hook()), brain = with(bf16_compress_hook());
    EXPECT_LT(half, 2e-3);
    EXPECT_LT(brain, 2e-2);
    EXPECT_GT(half, 1e-9) << "nothing was cast";
    EXPECT_GT(brain, half);
  });
}

// spec: K4 communication hooks of the user's
TEST(CommHooks, SeeEveryBucketInOrderAndReplaceIt) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 0.00001});
    std::vector<std::size_t> seen;
    model.register_comm_hook([&](const GradBucket& bucket) {
      seen.push_back(bucket.index);
      EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
      for (std::size_t i = 0; i < bucket.gradients.size(); ++i)
        EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i].sizes());
      if (bucket.is_last) seen.push_back(100);
      return [buffer = bucket.buffer] { return torch::full_like(buffer, 3); };
    });
    EXPECT_HAS(message_of<DistError>([&] { model.register_comm_hook(all_reduce_hook()); }),
               "registered before");
    for (int step = 0; step < 2; ++step)
      loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    EXPECT_EQ(seen, (std::vector<std::size_t>{0, 100, 0, 1, 2, 3, 4, 5, 100}))
        << "one bucket first, then one for each gradient";
    for (const auto& parameter : net->parameters())
      EXPECT_TRUE(parameter.grad().eq(3).all().item<bool>());
    DistributedDataParallel<Net> used(net_of(1));
    loss_of(used(inputs()), targets()).backward();
    EXPECT_HAS(message_of<DistError>([&] { used.register_comm_hook(all_reduce_hook()); }),
               "before the first backward");
  });
}

TEST(Buckets, AreLaidOutByRank0sOrderAfterTheFirstPass) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 0.00001});
    EXPECT_EQ(model.bucket_bytes().size(), 1u);
    loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    EXPECT_EQ(model.bucket_bytes().size(), 1u);
    model(share(inputs(), rank, 2));
    std::int64_t sum = 0;
    for (const auto bytes : model.bucket_bytes()) sum += bytes;
    EXPECT_EQ(model.bucket_bytes().size(), 6u);
    EXPECT_EQ(sum, static_cast<std::int64_t>(flat(net->parameters()).nbytes()));
  });
}

TEST(Buckets, HoldTheGradientsWhereTheyAreViews) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net, {.gradient_as_bucket_view = true});
    for (int step = 0; step < 3; ++step)
      loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
    const auto& storage = net->in->weight.grad().storage();
    for (const auto& parameter : net->parameters())
      EXPECT_TRUE(parameter.grad().storage().is_alias_of(storage));
  });
}

TEST(Errors, ASecondBackwardOnOneForwardIsNamed) {
  on_ranks(2, [](int rank) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net);
    const auto loss = loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2));
    loss.backward({}, true);
    EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }),
               "backward ran a second time over one forward pass");
    loss_of(model(share(inputs(), rank, 2)), share(targets(), rank, 2)).backward();
  });
}

TEST(Errors, AHookThatFailsIsNamedNowAndLater) {
  on_ranks(1, [](int) {
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net);
    model.register_comm_hook([](const GradBucket&) -> std::function<at::Tensor()> {
      throw DistError("the compressor ran dry");
    });
    EXPECT_HAS(message_of<DistError>([&] { loss_of(model(inputs()), targets()).backward(); }),
               "ran dry");
    EXPECT_HAS(message_of<DistError>([&] { model(inputs()); }),
               "an earlier reduction of the gradients failed");
  });
}

// A rank that dies in the middle of backward is named by all others.
TEST(Errors, ARankKilledInBackwardIsNamed) {
  const ScratchFolder folder;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    at::set_num_threads(1);
    init_process_group({.init_method = "file://" + folder.file("meet"),
                        .timeout = muster::testing::kMustHappen,
                        .world_size = 3,
                        .rank = rank});
    Net net = net_of(1);
    DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 0.00001});
    int step = 0;
    net->in->weight.register_hook([&](at::Tensor) {
      if (rank == 1 && step == 3) ::raise(SIGKILL);
    });
    try {
      for (; step < 1000; ++step)
        loss_of(model(share(inputs(), rank, 3)), share(targets(), rank, 3)).backward();
    } catch (const DistBackendError& error) {
      return error.ranks() == std::vector<int>{1} ? "named" : error.what();
    }
    return "nothing was thrown";
  });
  const auto ends = ranks.join(muster::testing::kMustHappen);
  EXPECT_EQ(ends[0].report, "named");
  EXPECT_EQ(ends[2].report, "named");
  EXPECT_TRUE(WIFSIGNALED(ends[1].wait_status));
}

TEST(Modules, OfAnyKindCanBeWrapped) {
  on_ranks(2, [](int) {
    DistributedDataParallel<nn::Linear> holder(nn::Linear(3, 2));
    EXPECT_EQ(holder.forward(torch::ones({1, 3})).sizes(), (std::vector<std::int64_t>{1, 2}));
    DistributedDataParallel<std::shared_ptr<NetImpl>> pointer(std::make_shared<NetImpl>());
    EXPECT_EQ(pointer(inputs()).size(1), 3);
    DistributedDataParallel<nn::AnyModule> any(nn::AnyModule(nn::Linear(3, 2)));
    any.forward(torch::ones({1, 3})).sum().backward();
    DistributedDataParallel<nn::Sequential> chain(
        nn::Sequential(nn::Linear(3, 4), nn::Linear(4, 1)));
    chain(torch::ones({1, 3})).sum().backward();
    EXPECT_EQ(chain.module()->parameters()[0].grad().sizes(), (std::vector<std::int64_t>{4, 3}));
  });
}

// A model's group is reused by the next model.
TEST(Modules, ShareAGroupOneAfterAnother) {
  on_ranks(2, [](int) {
    std::set<std::string> names;
    for (int number = 0; number < 5; ++number) {
      DistributedDataParallel<nn::Linear> model(nn::Linear(3, 2));
      model.forward(torch::ones({1, 3})).sum().backward();
      names.insert(model.process_group()->name());
    }
    EXPECT_EQ(names.size(), 1U);
    {
      DistributedDataParallel<nn::Linear> left(nn::Linear(3, 2));
      barrier();  // both have created theirs
      core_of(left.process_group()).abort("the end of this one");
    }
    DistributedDataParallel<nn::Linear> model(nn::Linear(3, 2));
    EXPECT_EQ(names.count(model.process_group()->name()), 0U);
  });
}

// spec: K4 a model whose outputs are a structure
TEST(Modules, MayReturnStructures) {
  struct PairImpl : nn::Module {
    PairImpl()
        : a(register_module("a", nn::Linear(2, 2))), b(register_module("b", nn::Linear(2, 2))) {}
    std::tuple<at::Tensor, std::vector<at::Tensor>, int> forward(const at::Tensor& x) {
      return {a(x), {b(x)}, 5};
    }
    nn::Linear a, b;
  };
  on_ranks(2, [](int) {
    const auto pair = std::make_shared<PairImpl>();
    DistributedDataParallel<std::shared_ptr<PairImpl>> model(pair,
                                                             {.find_unused_parameters = true});
    auto [first, rest, number] = model.forward(torch::ones({1, 2}));
    EXPECT_EQ(number, 5);
    (first.sum() + rest[0].sum()).backward();
    EXPECT_TRUE(pair->a->weight.grad().defined() && pair->b->weight.grad().defined());
  });
}

}  // namespace
}  // namespace muster::testing
