// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "muster/spawn.h"
#include "testing/limits.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

struct EmbeddedImpl : nn::Module {
  explicit EmbeddedImpl(bool sparse = false)
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(9, 5).sparse(sparse)))),
        in(register_module("in", nn::Linear(5, 7))),
        out(register_module("out", nn::Linear(7, 2))),
        seen(register_buffer("seen", torch::zeros({1}, at::kDouble))) {
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    double salt = 0;
    for (auto& parameter : parameters())
      parameter.copy_(
          (torch::sin((torch::arange(parameter.numel(), at::kDouble) + (salt += 17)) * 12.9898) *
           0.5)
              .view(parameter.sizes()));
  }
  at::Tensor forward(const at::Tensor& words) {
    seen += 1;
    return out(torch::tanh(in(table(words).mean(1))));
  }
  nn::Embedding table;
  nn::Linear in, out;
  at::Tensor seen;
};
TORCH_MODULE(Embedded);

at::Tensor words(int rank, int step) {
  return (torch::arange(6, at::kLong) * (rank + 2) + step * 3).remainder(9).view({2, 3});
}
int steps_of(int rank) {
  return 3 + 2 * ((rank * 2) % 3);
}  // 3, 7, 5, 3: rank 0 is among the first to run out

/// All ranks' batches in one process, divided as by a Join.
at::Tensor alone(int ranks, bool by_all, int epochs) {
  Embedded net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.5));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (int step = 0;; ++step) {
      optimizer.zero_grad();
      std::vector<at::Tensor> losses;
      for (int rank = 0; rank < ranks; ++rank)
        if (step < steps_of(rank)) losses.push_back(net(words(rank, step)).square().sum());
      if (losses.empty()) break;
      (torch::stack(losses).sum() / (by_all ? ranks : static_cast<int>(losses.size()))).backward();
      optimizer.step();
    }
  }
  return flat(net->parameters());
}

class UnevenInputs : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, UnevenInputs, ::testing::Values(1, 2, 3, 4));

// spec: K7.ddp DDP is joinable; a rank that is done shadows the others' collectives
// spec: K4.join join
TEST_P(UnevenInputs, TrainAsOneProcessWouldOnAll) {
  const int ranks = GetParam();
  // The rank with the most steps makes as many optimizer steps as the reference; one epoch only, so
  // that the other ranks' momentum does not matter.
  for (const bool by_all : {true, false}) {
    const auto expected = alone(ranks, by_all, 1);
    const std::vector<Options> variants{{},
                                        {.bucket_cap_mb = 0.0001},
                                        {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true},
                                        {.find_unused_parameters = true},
                                        {.static_graph = true}};
    for (std::size_t variant = 0; variant < variants.size(); ++variant) {
      for (const bool sparse : {false, true}) {
        on_ranks(ranks, [&](int rank) {
          Embedded net(sparse);
          DistributedDataParallel<Embedded> model(net, variants[variant]);
          torch::optim::SGD optimizer(net->parameters(),
                                      torch::optim::SGDOptions(0.2).momentum(sparse ? 0 : 0.5));
          auto join = model.join({.divide_by_initial_world_size = by_all});
          join.run([&] {
            for (int step = 0; step < steps_of(rank); ++step) {
              optimizer.zero_grad();
              model(words(rank, step)).square().sum().backward();
              optimizer.step();
            }
          });
          const auto mine = flat(net->parameters());
          if (!sparse) {
            EXPECT_LT(((mine - expected).norm() / expected.norm()).item<double>(), 1e-12)
                << variant << " " << by_all;
          }
          auto zero = mine.clone();
          broadcast(zero, {.src = 0});
          EXPECT_SAME(zero, mine) << "the last joiner's weights went to all";
          EXPECT_EQ(net->seen.item<double>(), std::min(ranks, 2) == 1 ? 3 : 7) << "and its buffers";
        });
      }
    }
  }
}

// spec: K7 again in each epoch, with other calls between epochs
TEST(UnevenInputs, JoinInEachEpochAndTrainEvenlyBetween) {
  on_ranks(3, [](int rank) {
    Embedded net;
    DistributedDataParallel<Embedded> model(net, {.bucket_cap_mb = 0.0001});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    const auto step = [&](int number) {
      optimizer.zero_grad();
      {
        const auto local = model.no_sync();
        model(words(rank, number)).square().sum().backward();
      }
      model(words(rank, number + 1)).square().sum().backward();
      optimizer.step();
    };
    for (int epoch = 0; epoch < 3; ++epoch) {
      auto join = model.join();
      join.run([&] {
        for (int number = 0; number < (epoch + rank) % 3; ++number) step(number);
      });
      step(7);
    }
    auto zero = flat(net->parameters());
    broadcast(zero, {.src = 0});
    EXPECT_SAME(zero, flat(net->parameters()));
  });
}

// spec: K7 throw_on_early_termination
TEST(UnevenInputs, MayStopAllInstead) {
  on_ranks(2, [](int rank) {
    Embedded net;
    DistributedDataParallel<Embedded> model(net);
    const auto text = message_of<DistError>([&] {
      auto join = model.join({.throw_on_early_termination = true});
      join.run([&] {
        for (int step = 0; step < 2 + rank; ++step)
          model(words(rank, step)).square().sum().backward();
      });
    });
    EXPECT_HAS(text, "rank 0 has run out of inputs");
    model(words(rank, 0)).square().sum().backward();  // the model stays usable
  });
}

// spec: K7 Join of several models, in their order
TEST(UnevenInputs, OfSeveralModelsInOneJoin) {
  on_ranks(3, [](int rank) {
    Embedded one, two;
    DistributedDataParallel<Embedded> first(one), second(two, {.find_unused_parameters = true});
    Join join({&first, &second}, {.divide_by_initial_world_size = false});
    join.run([&] {
      for (int step = 0; step < steps_of(rank); ++step) {
        first(words(rank, step)).square().sum().backward();
        second(words(rank, step)).square().sum().backward();
      }
    });
    for (const auto& net : {one, two}) {
      auto zero = flat(net->parameters());
      broadcast(zero, {.src = 0});
      EXPECT_SAME(zero, flat(net->parameters()));
    }
  });
}

// spec: K7 DDP and ZeroRedundancyOptimizer are joinable
TEST(UnevenInputs, OfAModelAndItsDividedOptimizer) {
  on_ranks(3, [](int rank) {
    Embedded net;
    DistributedDataParallel<Embedded> model(net, {.bucket_cap_mb = 0.0001});
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
        net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.5));
    Join join({&model, &optimizer});
    join.run([&] {
      for (int step = 0; step < steps_of(rank); ++step) {
        optimizer.zero_grad();
        model(words(rank, step)).square().sum().backward();
        optimizer.step();
      }
    });
    const auto mine = flat(net->parameters());
    auto zero = mine.clone();
    broadcast(zero, {.src = 0});
    EXPECT_SAME(zero, mine);
  });
}

struct HeadsImpl : nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {one(x), two(x)}; }
  nn::Linear one{register_module("one", nn::Linear(2, 1))},
      two{register_module("two", nn::Linear(2, 1))};
};
TORCH_MODULE(Heads);

// A rank's unfinished iteration is told as outside of a Join, whether it goes on or has no more
// inputs: before it notifies the others; H11 names the parameters that got no gradient,
// inside a Join too
TEST(UnevenInputs, NameTheParameterThatALossLeftOut) {
  const auto trained = [](int rank, bool last, bool stops) {
    Heads net;
    DistributedDataParallel<Heads> model(net);
    const auto text = message_of<DistError>([&] {
      auto join = model.join({.throw_on_early_termination = stops});
      join.run([&] {
        for (int step = 0; step < 4; ++step) {
          const auto [one, two] = model(torch::ones({3, 2}));
          const bool leaves_out = rank == 1 && step == 2;
          (leaves_out ? one : one + two).sum().backward();
          if (last && leaves_out) return;
        }
      });
    });
    EXPECT_HAS(text, rank == 1 ? "did not receive grad for rank 1: two.weight" : "rank 1")
        << (last ? "at the end" : "in the middle");
  };
  for (const bool last : {false, true})
    for (const bool stops : {false, true}) {
      const auto store = std::make_shared<HashStore>();
      const auto whole = [&](int rank) {
        init_process_group({.timeout = muster::testing::kMustHappen,
                            .world_size = 2,
                            .rank = rank,
                            .store = store});
        trained(rank, last, stops);
        try {
          destroy_process_group();
        } catch (const DistError&) {
          // Destroying a failed group may throw again.
        }
      };
      spawn(whole, {.nprocs = 2, .mode = SpawnMode::threads});
    }
}

// The optimizer on a shadowing rank uses the other ranks' gradients, not those of an earlier
// iteration.
TEST(UnevenInputs, KeepNoGradientThatNobodyHas) {
  on_ranks(2, [](int rank) {
    Heads net;
    DistributedDataParallel<Heads> model(net, {.find_unused_parameters = true});
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                         torch::optim::SGDOptions(1));
    at::Tensor after_first;
    Join join({&model, &optimizer});
    join.run([&] {
      for (int step = 0; step < (rank == 0 ? 4 : 1); ++step) {
        optimizer.zero_grad();
        const auto [one, two] = model(torch::ones({3, 2}));
        (step == 0 ? one + two : one).sum().backward();
        optimizer.step();
        if (step == 0) after_first = flat(net->two->parameters());
      }
    });
    EXPECT_SAME(flat(net->two->parameters()), after_first);
  });
}

// spec: K7 enable
TEST(UnevenInputs, NotWatchedWhereNotEnabled) {
  on_ranks(2, [](int rank) {
    Embedded net;
    DistributedDataParallel<Embedded> model(net);
    auto join = model.join({.enable = false});
    join.run([&] {
      for (int step = 0; step < 3; ++step) model(words(rank, step)).square().sum().backward();
    });
    EXPECT_EQ(model.join_process_group(), default_group());
    EXPECT_TRUE(model.join_device().is_cpu());
  });
}

}  // namespace
}  // namespace muster::testing
