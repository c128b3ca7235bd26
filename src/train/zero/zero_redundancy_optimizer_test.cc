// SPDX-License-Identifier: BSD-3-Clause
#include "muster/zero_redundancy_optimizer.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/limits.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ParamGroup = optim::OptimizerParamGroup;

/// Seven parameters of different sizes, equal on every rank and call.
std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> all;
  int salt = 0;
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{7, 5}, {5}, {3, 3, 2}, {1}, {9, 4}, {11}, {2, 13}}) {
    const auto count = c10::multiply_integers(shape);
    all.push_back((torch::sin(torch::arange(count, at::kDouble) * 0.7 + ++salt) * 0.5)
                      .to(at::kFloat)
                      .view(shape)
                      .set_requires_grad(true));
  }
  return all;
}

/// As after DistributedDataParallel: equal gradients on every rank, different in each step.
void set_gradients(const std::vector<at::Tensor>& all, int step) {
  int salt = step * 31;
  for (at::Tensor parameter : all) {
    const auto numbers = torch::arange(parameter.numel(), at::kDouble) * 1.3 + ++salt;
    parameter.mutable_grad() = torch::cos(numbers).to(at::kFloat).view(parameter.sizes());
  }
}

void train(optim::Optimizer& optimizer, const std::vector<at::Tensor>& all, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    set_gradients(all, step);
    optimizer.step();
  }
}

void expect_same(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(same_bytes(ours[i].detach(), theirs[i].detach())) << "parameter " << i << ":\n"
                                                                  << ours[i] << "\nand\n"
                                                                  << theirs[i];
}

/// One optimizer class with its options, unsharded and sharded.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)> whole;
  std::function<std::unique_ptr<parallel::ShardedOptimizer>(std::vector<at::Tensor>,
                                                            const ZeroRedundancyOptions&)>
      divided;
};
template <class Optimizer, class Options>
Kind kind(std::string name, Options options) {
  return {std::move(name),
          [options](std::vector<at::Tensor> all) {
            return std::make_unique<Optimizer>(std::move(all), options);
          },
          [options](std::vector<at::Tensor> all, const ZeroRedundancyOptions& how) {
            return std::make_unique<ZeroRedundancyOptimizer<Optimizer>>(std::move(all), options,
                                                                        how);
          }};
}
std::vector<Kind> kinds() {
  return {
      kind<optim::SGD>("SGD",
                       optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-3)),
      kind<optim::Adam>("Adam", optim::AdamOptions(0.02).amsgrad(true)),
      kind<optim::AdamW>("AdamW", optim::AdamWOptions(0.02)),
      kind<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.05).lr_decay(0.01)),
      kind<optim::RMSprop>("RMSprop", optim::RMSpropOptions(0.01).momentum(0.5).centered(true))};
}

TEST(ShardParameters, GivesTheLargestToTheLeastLoaded) {
  using Owners = std::vector<std::vector<int>>;
  EXPECT_EQ(parallel::shard_parameters({{1, 10, 4, 6}}, 2), (Owners{{0, 0, 1, 1}}));
  EXPECT_EQ(parallel::shard_parameters({{5, 5, 5}}, 4), (Owners{{0, 1, 2}}));
  // Loads carry over between groups, so a later group does not change earlier assignments.
  EXPECT_EQ(parallel::shard_parameters({{8}, {3, 3}, {1}}, 2), (Owners{{0}, {1, 1}, {1}}));
  EXPECT_EQ(parallel::shard_parameters({{4, 2}}, 1), (Owners{{0, 0}}));
}

class Zero : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Zero, ::testing::Values(1, 2, 3, 4));

// spec: K8 the weights are those of the undivided optimizer, bit for bit, with and without buckets
TEST_P(Zero, StepsLikeTheUndividedOptimizer) {
  const int ranks = GetParam();
  for (const Kind& kind : kinds()) {
    for (const bool buckets : {false, true}) {
      SCOPED_TRACE(kind.name + (buckets ? " in buckets" : ""));
      const auto alone = parameters();
      const auto whole = kind.whole(alone);
      train(*whole, alone, 0, 6);
      on_ranks(ranks, [&](int) {
        const auto mine = parameters();
        const auto divided = kind.divided(mine, {.parameters_as_bucket_view = buckets});
        train(*divided, mine, 0, 6);
        expect_same(mine, alone);
        auto remembered =
            torch::tensor({static_cast<std::int64_t>(divided->local().state().size())});
        EXPECT_LT(remembered.item<std::int64_t>(), ranks == 1 ? 8 : 7);
        all_reduce(remembered);
        EXPECT_EQ(remembered.item<std::int64_t>(), 7) << "each parameter's state is on one rank";
      });
    }
  }
}

// spec: K8 parameter groups, options that change, add_param_group
TEST_P(Zero, KeepsParameterGroups) {
  const auto run = [](auto make, const std::vector<at::Tensor>& all) {
    std::vector<ParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{all[0], all[1]},
                        std::make_unique<optim::AdamOptions>(0.5));
    groups.emplace_back(std::vector<at::Tensor>{all[2], all[3], all[4]});
    auto optimizer = make(groups);
    train(*optimizer, all, 0, 3);
    static_cast<optim::AdamOptions&>(optimizer->param_groups()[1].options())
        .lr(0.001);  // the class's default, not a request to inherit
    train(*optimizer, all, 3, 5);
    optimizer->add_param_group(
        ParamGroup({all[5], all[6]}, std::make_unique<optim::AdamOptions>(0.2)));
    train(*optimizer, all, 5, 8);
  };
  const auto alone = parameters();
  run(
      [](const auto& groups) {
        return std::make_unique<optim::Adam>(groups, optim::AdamOptions(0.1));
      },
      alone);
  on_ranks(GetParam(), [&](int) {
    for (const bool buckets : {false, true}) {
      const auto mine = parameters();
      run(
          [&](const auto& groups) {
            return std::make_unique<ZeroRedundancyOptimizer<optim::Adam>>(
                groups, optim::AdamOptions(0.1),
                ZeroRedundancyOptions{.parameters_as_bucket_view = buckets});
          },
          mine);
      expect_same(mine, alone);
    }
  });
}

// spec: K8 the state of all ranks on one; saved state can be loaded unsharded, and sharded over
// another number of ranks
TEST_P(Zero, StateGoesOnAtAnyNumberOfRanks) {
  const int ranks = GetParam();
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto alone = parameters();
    train(*kind.whole(alone), alone, 0, 0);
    const auto whole = kind.whole(alone);
    train(*whole, alone, 0, 4);
    std::vector<at::Tensor> weights;
    for (const auto& each : alone) weights.push_back(each.detach().clone());
    train(*whole, alone, 4, 7);

    std::string bytes;
    on_ranks(ranks, [&](int rank) {
      const auto mine = parameters();
      const auto divided = kind.divided(mine, {});
      train(*divided, mine, 0, 4);
      const int to = ranks - 1;
      divided->consolidate_state_dict(to);
      if (rank == to) {
        bytes = divided->state_dict();
      } else {
        EXPECT_HAS(message_of<DistError>([&] { divided->state_dict(); }),
                   "call consolidate_state_dict(" + std::to_string(rank) + ") on all ranks first");
      }
    });

    const auto restart = [&](const std::vector<at::Tensor>& all) {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < all.size(); ++i) at::Tensor(all[i]).copy_(weights[i]);
    };
    const auto undivided = parameters();
    restart(undivided);
    const auto loaded = kind.whole(undivided);
    std::istringstream in(bytes);
    torch::load(*loaded, in);
    train(*loaded, undivided, 4, 7);
    expect_same(undivided, alone);

    on_ranks(5 - ranks, [&](int) {
      const auto mine = parameters();
      restart(mine);
      const auto divided = kind.divided(mine, {.parameters_as_bucket_view = true});
      divided->load_state_dict(bytes);
      train(*divided, mine, 4, 7);
      expect_same(mine, alone);
    });
  }
}

// spec: K8 an undivided optimizer's state
TEST(ZeroState, OfAnUndividedOptimizerIsLoadedWithItsOptions) {
  const auto alone = parameters();
  optim::SGD whole(alone, optim::SGDOptions(0.1).momentum(0.9));
  train(whole, alone, 0, 3);
  whole.param_groups()[0].options().set_lr(0.3);
  std::ostringstream out;
  torch::save(whole, out);
  std::vector<at::Tensor> weights;
  for (const auto& each : alone) weights.push_back(each.detach().clone());
  train(whole, alone, 3, 6);
  on_ranks(2, [&](int) {
    std::vector<at::Tensor> mine;
    for (const auto& each : weights) mine.push_back(each.clone().set_requires_grad(true));
    ZeroRedundancyOptimizer<optim::SGD> divided(mine, optim::SGDOptions(0.1).momentum(0.9));
    std::istringstream in(out.str());
    torch::load(divided, in);
    EXPECT_EQ(divided.param_groups()[0].options().get_lr(), 0.3);
    train(divided, mine, 3, 6);
    expect_same(mine, alone);
  });
}

// Like torch::load: replaces a parameter's memory.
TEST(ZeroBuckets, TakeBackParametersThatWereLoaded) {
  const auto alone = parameters();
  optim::SGD whole(alone, optim::SGDOptions(0.1));
  const auto load = [](const std::vector<at::Tensor>& all) {
    const torch::NoGradGuard no_grad;
    for (const auto& each : all) at::Tensor(each).set_(torch::full_like(each.detach(), 0.25));
  };
  load(alone);
  train(whole, alone, 0, 3);
  on_ranks(3, [&](int) {
    const auto mine = parameters();
    ZeroRedundancyOptimizer<optim::SGD> optimizer(mine, optim::SGDOptions(0.1),
                                                  {.parameters_as_bucket_view = true});
    load(mine);
    train(optimizer, mine, 0, 3);
    expect_same(mine, alone);
  });
}

// Adam rejects sparse gradients; only the parameter's owner notices.
TEST(ZeroStep, ThatThrowsOnOneRankEndsAllWithTheReason) {
  for (const bool views : {false, true}) {
    const auto store = std::make_shared<HashStore>();
    std::barrier made(
        2);  // the failure must not occur while the other rank is still constructing its optimizer
    const auto body = [&](int rank) {
      init_process_group(
          {.timeout = muster::testing::kMustHappen, .world_size = 2, .rank = rank, .store = store});
      std::vector<at::Tensor> all{torch::ones({4, 2}).set_requires_grad(true),
                                  torch::ones({4, 2}).set_requires_grad(true)};
      ZeroRedundancyOptimizer<optim::Adam> optimizer(all, optim::AdamOptions(0.1),
                                                     {.parameters_as_bucket_view = views});
      all[0].mutable_grad() = torch::ones({4, 2});
      all[1].mutable_grad() = torch::ones({4, 2}).to_sparse(1);
      made.arrive_and_wait();
      if (optimizer.rank_of(all[1]) == rank) {
        EXPECT_HAS(message_of<c10::Error>([&] { optimizer.step(); }), "sparse");
      } else {
        const auto said = message_of<DistError>([&] { optimizer.step(); });
        EXPECT_HAS(said, "the step of a ZeroRedundancyOptimizer failed on rank 1");
        EXPECT_HAS(said, "sparse");
        EXPECT_EQ(said.find("frame #0"), std::string::npos) << said;
      }
      try {
        destroy_process_group();
      } catch (const DistError&) {
        // Destroying a failed group may throw again.
      }
    };
    spawn(body, {.nprocs = 2, .mode = SpawnMode::threads});
  }
}

TEST(ZeroStep, GoesOnWhereTheClosureThrewOnAllRanks) {
  on_ranks(2, [](int) {
    const auto mine = parameters();
    ZeroRedundancyOptimizer<optim::SGD> optimizer(mine, optim::SGDOptions(0.1));
    set_gradients(mine, 0);
    EXPECT_THROW(optimizer.step([]() -> at::Tensor { throw std::runtime_error("no batch"); }),
                 std::runtime_error);
    optimizer.step();
  });
}

TEST(ZeroStep, GivesTheClosuresLoss) {
  on_ranks(2, [](int) {
    const auto mine = parameters();
    ZeroRedundancyOptimizer<optim::SGD> optimizer(mine, optim::SGDOptions(0.1));
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      const auto sum = mine[0].square().sum();
      sum.backward();
      return sum;
    });
    EXPECT_GT(loss.item<float>(), 0);
    EXPECT_LT(mine[0].square().sum().item<float>(), loss.item<float>());
  });
}

// ---- with DistributedDataParallel

struct NetImpl : nn::Module {
  NetImpl()
      : in(register_module("in", nn::Linear(6, 16))),
        out(register_module("out", nn::Linear(16, 2))) {
    const torch::NoGradGuard no_grad;
    int salt = 0;
    for (auto& each : parameters())
      each.copy_(
          torch::sin(torch::arange(each.numel(), at::kFloat) * 0.9 + ++salt).view(each.sizes()) *
          0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(in(x))); }
  nn::Linear in, out;
};
TORCH_MODULE(Net);

at::Tensor batch(int rank, int step) {
  return torch::sin(torch::arange(24, at::kFloat) * (0.3 + rank) + step).view({4, 6});
}

std::vector<at::Tensor> trained_with_ddp(
    int rank, const DistributedDataParallelOptions& options,
    const std::function<std::unique_ptr<optim::Optimizer>(DistributedDataParallel<Net>&)>& make) {
  Net net;
  DistributedDataParallel<Net> model(net, options);
  const auto optimizer = make(model);
  for (int step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    model.forward(batch(rank, step)).square().mean().backward();
    optimizer->step();
  }
  return net->parameters();
}

// spec: K8 overlap with DistributedDataParallel: from the first iteration on the same weights, bit
// for bit
TEST_P(Zero, StepsInsideBackward) {
  on_ranks(GetParam(), [](int rank) {
    const auto adam = optim::AdamOptions(0.05);
    for (const double bucket_mb : {25.0, 0.0001})
      for (const bool views : {false, true}) {
        const DistributedDataParallelOptions options{.bucket_cap_mb = bucket_mb,
                                                     .gradient_as_bucket_view = views};
        const auto plain = trained_with_ddp(rank, options, [&](auto& model) {
          model.register_comm_hook(all_reduce_hook());
          return std::make_unique<optim::Adam>(model.module()->parameters(), adam);
        });
        const auto overlapped = trained_with_ddp(rank, options, [&](auto& model) {
          auto optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::Adam>>(
              model.module()->parameters(), adam,
              ZeroRedundancyOptions{.parameters_as_bucket_view = views, .overlap_with_ddp = true});
          model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), *optimizer));
          return optimizer;
        });
        expect_same(overlapped, plain);
      }
  });
}

// spec: K7.zero ZeroRedundancyOptimizer is joinable
TEST_P(Zero, OfARankWithoutInputsGoesOnUpdatingItsPart) {
  const int ranks = GetParam();
  const auto alone = parameters();
  optim::SGD whole(alone, optim::SGDOptions(0.1).momentum(0.5));
  for (int step = 0; step < ranks; ++step) train(whole, alone, 0, 1);
  on_ranks(ranks, [&](int rank) {
    const auto mine = parameters();
    ZeroRedundancyOptimizer<optim::SGD> optimizer(mine, optim::SGDOptions(0.1).momentum(0.5));
    Join join({&optimizer});
    join.run([&] {
      for (int step = 0; step <= rank; ++step) train(optimizer, mine, 0, 1);
    });
    expect_same(mine, alone);
  });
}

/// Rank r has 2 + 2 * ((r * 2) % 3) inputs: 2, 6, 4, 2.
std::vector<at::Tensor> trained_unevenly(int rank, bool divides, bool overlaps,
                                         const DistributedDataParallelOptions& options) {
  Net net;
  DistributedDataParallel<Net> model(net, options);
  const auto adam = optim::AdamOptions(0.05);
  std::unique_ptr<optim::Optimizer> optimizer;
  std::vector<Joinable*> joinables{&model};
  if (divides) {
    auto zero = std::make_unique<ZeroRedundancyOptimizer<optim::Adam>>(
        net->parameters(), adam, ZeroRedundancyOptions{.overlap_with_ddp = overlaps});
    joinables.push_back(zero.get());
    if (overlaps) model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), *zero));
    optimizer = std::move(zero);
  } else {
    if (overlaps) model.register_comm_hook(all_reduce_hook());
    optimizer = std::make_unique<optim::Adam>(net->parameters(), adam);
  }
  Join join(joinables);
  join.run([&] {
    for (int step = 0; step < 2 + 2 * ((rank * 2) % 3); ++step) {
      optimizer->zero_grad();
      model.forward(batch(rank, step)).square().mean().backward();
      optimizer->step();
    }
  });
  return net->parameters();
}

// spec: K7 DDP and ZeroRedundancyOptimizer in one Join: all ranks get the weights of the rank that
// trains to the end, bitwise equal to those of an unsharded optimizer
TEST_P(Zero, JoinsWithItsModel) {
  on_ranks(GetParam(), [](int rank) {
    for (const bool overlaps : {false, true})
      for (const bool views : {false, true})
        for (const double bucket_mb : {25.0, 0.0001}) {
          const DistributedDataParallelOptions options{.bucket_cap_mb = bucket_mb,
                                                       .gradient_as_bucket_view = views};
          expect_same(trained_unevenly(rank, true, overlaps, options),
                      trained_unevenly(rank, false, overlaps, options));
        }
  });
}

// spec: K8 overlap and mixed precision
TEST(ZeroErrors, RefuseOverlapWithMixedPrecision) {
  on_ranks(1, [](int) {  // With several, each would also learn of the others' failure, at the
                         // latest when it destroys the groups.
    Net net;
    DistributedDataParallel<Net> model(
        net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    ZeroRedundancyOptimizer<optim::SGD> optimizer(net->parameters(), optim::SGDOptions(0.1),
                                                  {.overlap_with_ddp = true});
    model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), optimizer));
    const auto loss = model.forward(batch(0, 0)).square().mean();
    EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "leave overlap_with_ddp out");
  });
}

TEST(ZeroErrors, NameWhatToChange) {
  on_ranks(2, [](int rank) {
    const auto mine = parameters();
    const auto differ = message_of<DistError>([&] {
      ZeroRedundancyOptimizer<optim::SGD>(std::vector<at::Tensor>{rank == 0 ? mine[0] : mine[1]},
                                          optim::SGDOptions(0.1));
    });
    EXPECT_HAS(differ,
               "'parameter 0 of group 0: [7, 5] Float' on rank 0, 'parameter 0 of group 0: [5] "
               "Float' on rank 1");
    EXPECT_HAS(message_of<DistError>([&] {
                 ZeroRedundancyOptimizer<optim::SGD>(std::vector<at::Tensor>{},
                                                     optim::SGDOptions(0.1));
               }),
               "there are no parameters");
    ZeroRedundancyOptimizer<optim::SGD> optimizer(mine, optim::SGDOptions(0.1));
    EXPECT_HAS(message_of<DistError>([&] { hook_with_zero_step(all_reduce_hook(), optimizer); }),
               "with overlap_with_ddp");
    EXPECT_HAS(message_of<DistError>([&] { optimizer.rank_of(torch::ones(3)); }),
               "none of its parameters");
    EXPECT_EQ(optimizer.rank_of(mine[4]), 0) << "the largest goes to the first";
  });
}

}  // namespace
}  // namespace muster::testing
