// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/process_usage.h"
#include "testing/seed.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = DistributedDataParallelOptions;

/// Large enough that one leaked gradient per step is noticed, and that one is reduced in place.
struct LargeImpl : nn::Module {
  explicit LargeImpl(bool sparse)
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(50, 64).sparse(sparse)))),
        in(register_module("in", nn::Linear(64, 320))),
        out(register_module("out", nn::Linear(320, 8))) {}
  at::Tensor forward(const at::Tensor& words) { return out(torch::relu(in(table(words)))); }
  nn::Embedding table;
  nn::Linear in, out;
};
TORCH_MODULE(Large);

/// One configuration of training.
struct Way {
  const char* name;
  Options options = {};
  std::function<CommHook()> hook = {};
  bool zero = false;   // sharded optimizer with two state tensors per parameter
  bool joins = false;  // rank 1 has inputs for three of five steps
};

CommHook power_sgd() {
  return powerSGD_hook(std::make_shared<PowerSGDState>(
      PowerSGDOptions{.start_powerSGD_iter = 2, .batch_tensors_with_same_shape = true}));
}

const std::vector<Way> kWays{
    {.name = "small buckets", .options = {.bucket_cap_mb = 0.02}},
    {.name = "unused parameters", .options = {.find_unused_parameters = true}},
    {.name = "a static graph with views",
     .options = {.gradient_as_bucket_view = true, .static_graph = true}},
    {.name = "mixed precision",
     .options = {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}},
    {.name = "a Join", .options = {.bucket_cap_mb = 0.02}, .joins = true},
    {.name = "a Join of a static graph with views",
     .options = {.gradient_as_bucket_view = true, .static_graph = true},
     .joins = true},
    {.name = "a hook that compresses",
     .options = {.bucket_cap_mb = 0.02},
     .hook = [] { return fp16_compress_hook(); }},
    {.name = "PowerSGD", .hook = power_sgd},
    {.name = "ZeRO", .zero = true},
    {.name = "ZeRO in a Join, with a hook",
     .hook = [] { return bf16_compress_hook(); },
     .zero = true,
     .joins = true},
};
/// The subset tested in an ordinary run: always two that differ only in options, and two of the
/// others.
constexpr std::size_t kPlain = 4, kOfEach = 2;

std::vector<Way> drawn() {
  if (long_tests()) return kWays;
  std::mt19937_64 random(test_seed());
  std::vector<Way> ways;
  std::ranges::sample(kWays.begin(), kWays.begin() + kPlain, std::back_inserter(ways), kOfEach,
                      random);
  std::ranges::sample(kWays.begin() + kPlain, kWays.end(), std::back_inserter(ways), kOfEach,
                      random);
  return ways;
}

class TrainingRun {
 public:
  static constexpr int kSteps = 5;  // of a round

  TrainingRun(const Way& way, int rank)
      : way_(way), rank_(rank), net_(!way.hook && !way.zero), model_(net_, way.options) {
    if (way.hook) model_.register_comm_hook(way.hook());
    joinables_.push_back(&model_);
    if (way.zero) {
      auto zero = std::make_unique<ZeroRedundancyOptimizer<optim::Adam>>(net_->parameters(),
                                                                         optim::AdamOptions(0.01));
      joinables_.push_back(zero.get());
      optimizer_ = std::move(zero);
    } else {
      optimizer_ = std::make_unique<optim::SGD>(net_->parameters(), optim::SGDOptions(0.01));
    }
  }
  void round() {
    std::optional<Join> join;
    if (way_.joins) join.emplace(joinables_);
    for (int i = 0; i < (way_.joins && rank_ == 1 ? 3 : kSteps); ++i) step();
    if (join) join->finish();
  }

 private:
  void step() {
    optimizer_->zero_grad();
    model_(torch::arange(4, at::kLong) + step_++ % 40 + rank_)
        .square()
        .mean()
        .to(at::kFloat)
        .backward();
    optimizer_->step();
  }

  const Way& way_;
  const int rank_;
  int step_ = 0;
  Large net_;
  DistributedDataParallel<Large> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<Joinable*> joinables_;
};

// spec: K2 training goes on for as long as one likes
// spec: K4 with communication hooks, K7 inside Joins, K8 with a divided optimizer
TEST(DdpMemory, DoesNotGrow) {
  if (!kMemoryTells) GTEST_SKIP() << "sanitizers keep freed memory";
  const int rounds = (long_tests() ? 10000 : 500) / TrainingRun::kSteps,
            warm_up = 100 / TrainingRun::kSteps;
  for (const Way& way : drawn()) {
    on_ranks(2, [&](int rank) {
      TrainingRun training(way, rank);
      MemoryInUse before;
      for (int round = 0; round < rounds; ++round) {
        if (round == warm_up) {
          barrier();  // neither rank is inside a step
          before = memory_in_use();
          barrier();
        }
        training.round();
      }
      barrier();
      const auto after = memory_in_use();
      barrier();
      constexpr std::size_t kSlack = std::size_t{2} << 20;
      EXPECT_LT(after.own, before.own + kSlack)
          << way.name << ": grew by " << after.own - before.own << " bytes";
      EXPECT_LT(after.shared, before.shared + kSlack) << way.name;
    });
  }
}

}  // namespace
}  // namespace muster::testing
