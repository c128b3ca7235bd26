// SPDX-License-Identifier: BSD-3-Clause
#include "muster/comm_hook.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "train/ddp/testing/relative_difference.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;

/// A bucket as passed by the reducer: two matrices of one shape, one of another, and a bias.
struct Bucket {
  explicit Bucket(at::ScalarType dtype = at::kDouble) {
    const std::vector<std::vector<std::int64_t>> shapes{{12, 9}, {7}, {12, 9}, {20, 3, 4}};
    std::int64_t elements = 0;
    for (const auto& shape : shapes) elements += c10::multiply_integers(shape);
    given.buffer = at::zeros({elements}, dtype);
    given.is_last = true;
    std::int64_t at = 0;
    for (const auto& shape : shapes) {
      const auto count = c10::multiply_integers(shape);
      given.gradients.push_back(given.buffer.narrow(0, at, count).view(shape));
      at += count;
    }
  }
  /// This rank's gradients in each pass of `salt`.
  static at::Tensor gradient(const at::Tensor& like, int rank, int salt = 0) {
    const auto seed = static_cast<std::uint64_t>(100 * salt + rank);
    return at::randn({like.numel()}, at::detail::createCPUGenerator(seed), at::kDouble)
        .to(like.scalar_type());
  }
  at::Tensor pass(const CommHook& hook, const at::Tensor& gradient) {
    given.buffer.copy_(gradient);
    return hook(given)().clone();
  }
  GradBucket given;
};

at::Tensor mean_of_ranks(const at::Tensor& like, int ranks, int salt = 0) {
  auto sum = at::zeros_like(like);
  for (int rank = 0; rank < ranks; ++rank) sum += Bucket::gradient(like, rank, salt);
  return sum / ranks;
}

void expect_same_everywhere(const at::Tensor& mine) {
  auto rank_0 = mine.clone();
  broadcast(rank_0, {.src = 0});
  EXPECT_TRUE(same_bytes(rank_0, mine));
}

using MakeHook = CommHook (*)(std::shared_ptr<PowerSGDState>);
CommHook hook_of(MakeHook make, const PowerSGDOptions& options) {
  return make(std::make_shared<PowerSGDState>(options));
}

class PowerSGD : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PowerSGD, ::testing::Values(1, 2, 3, 4));

// spec: K4 the PowerSGD hook: with factors of full rank it is the average
TEST_P(PowerSGD, OfFullRankIsTheAverage) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    for (const MakeHook make : {powerSGD_hook, batched_powerSGD_hook})
      for (const bool batches : {false, true})
        for (const bool remembers : {false, true}) {
          const auto hook = hook_of(make, {.matrix_approximation_rank = 99,
                                           .start_powerSGD_iter = remembers ? 2 : 0,
                                           .min_compression_rate = 1e-3,
                                           .use_error_feedback = remembers,
                                           .warm_start = remembers,
                                           .batch_tensors_with_same_shape = batches});
          Bucket bucket;
          for (int pass = 0; pass < 5; ++pass) {
            const auto got = bucket.pass(hook, Bucket::gradient(bucket.given.buffer, rank, pass));
            EXPECT_LT(testing::relative_difference(got, mean_of_ranks(got, ranks, pass)), 1e-12);
          }
        }
  });
}

// spec: K4 the PowerSGD hook: the same bits on every rank
TEST_P(PowerSGD, GivesTheSameBitsEverywhere) {
  on_ranks(GetParam(), [](int rank) {
    for (const MakeHook make : {powerSGD_hook, batched_powerSGD_hook})
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
        for (const int columns : {1, 2, 4}) {
          const auto hook = hook_of(make, {.matrix_approximation_rank = columns,
                                           .start_powerSGD_iter = 2,
                                           .min_compression_rate = 1});
          Bucket bucket(dtype);
          for (int pass = 0; pass < 5; ++pass)
            expect_same_everywhere(
                bucket.pass(hook, Bucket::gradient(bucket.given.buffer, rank, pass)));
        }
  });
}

// spec: K4 the PowerSGD hook: error feedback eventually sends what one pass could not
TEST_P(PowerSGD, MakesGoodItsErrorsInLaterPasses) {
  const int ranks = GetParam();
  constexpr int kPasses = 150;
  on_ranks(ranks, [&](int rank) {
    const auto mean_sent = [&](const PowerSGDOptions& options) {
      const auto hook = hook_of(powerSGD_hook, options);
      Bucket bucket;
      auto sum = at::zeros_like(bucket.given.buffer);
      for (int pass = 0; pass < kPasses; ++pass)
        sum += bucket.pass(hook, Bucket::gradient(sum, rank));
      return sum / kPasses;
    };
    const auto with = mean_sent({.start_powerSGD_iter = 2, .min_compression_rate = 1});
    const auto without = mean_sent(
        {.start_powerSGD_iter = 2, .min_compression_rate = 1, .use_error_feedback = false});
    const auto truth = mean_of_ranks(with, ranks);
    EXPECT_LT(testing::relative_difference(with, truth), 0.1);
    EXPECT_GT(testing::relative_difference(without, truth), 0.2);
  });
}

// spec: K4 the PowerSGD hook: start_powerSGD_iter and min_compression_rate
TEST(PowerSGDHook, SendsWholeWhatIsNotWorthCompressing) {
  on_ranks(2, [](int rank) {
    const auto state = std::make_shared<PowerSGDState>(
        PowerSGDOptions{.start_powerSGD_iter = 3, .min_compression_rate = 5});
    const auto hook = powerSGD_hook(state);
    Bucket bucket;
    for (int pass = 0; pass < 4; ++pass) {
      const auto got = bucket.pass(hook, Bucket::gradient(bucket.given.buffer, rank));
      const auto truth = mean_of_ranks(got, 2);
      EXPECT_EQ(state->iteration(), pass + 1);
      if (pass < 3) {
        EXPECT_LT(testing::relative_difference(got, truth), 1e-15) << "pass " << pass;
        EXPECT_EQ(state->compression_stats().before, 0);
        continue;
      }
      // 12 x 9 in 21 elements: a ratio of 5.1. 20 x 12 in 32: 7.5. The bias is not a matrix.
      EXPECT_GT(testing::relative_difference(got.narrow(0, 0, 108), truth.narrow(0, 0, 108)), 0.1);
      EXPECT_LT(testing::relative_difference(got.narrow(0, 108, 7), truth.narrow(0, 108, 7)),
                1e-15);
      EXPECT_EQ(state->compression_stats().before, 463);
      EXPECT_EQ(state->compression_stats().after, 21 + 7 + 21 + 32);
      EXPECT_NEAR(state->compression_stats().rate(), 463.0 / 81, 1e-12);
    }
  });
}

TEST(PowerSGDHook, StandsGradientsOfZero) {
  on_ranks(2, [](int) {
    for (const int columns : {1, 3}) {
      const auto hook = hook_of(powerSGD_hook, {.matrix_approximation_rank = columns,
                                                .start_powerSGD_iter = 2,
                                                .min_compression_rate = 1});
      Bucket bucket(at::kFloat);
      for (int pass = 0; pass < 5; ++pass)
        EXPECT_EQ(bucket.pass(hook, at::zeros_like(bucket.given.buffer)).abs().max().item<float>(),
                  0);
      const auto later = bucket.pass(hook, at::ones_like(bucket.given.buffer));
      EXPECT_TRUE(later.isfinite().all().item<bool>());
    }
  });
}

/// Learns a teacher's matrix from samples divided among the ranks.
double loss_after(int rank, int ranks, int steps, const CommHook& hook) {
  const auto number = [](std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
    return at::randn({rows, columns}, at::detail::createCPUGenerator(seed), at::kDouble);
  };
  nn::Linear net(16, 12);
  net->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto& each : net->parameters()) each.zero_();
  }
  DistributedDataParallel<nn::Linear> model(net);
  model.register_comm_hook(hook);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.4));
  const auto inputs = number(48, 16, 3), targets = inputs.matmul(number(16, 12, 9)) + 0.2;
  double loss = 0;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model.forward(inputs.chunk(ranks)[static_cast<std::size_t>(rank)])
        .sub(targets.chunk(ranks)[static_cast<std::size_t>(rank)])
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
  {
    const torch::NoGradGuard no_grad;
    loss = net->forward(inputs).sub(targets).square().mean().item<double>();
  }
  std::vector<at::Tensor> flat;
  for (const auto& each : net->parameters()) flat.push_back(each.detach().reshape({-1}));
  expect_same_everywhere(at::cat(flat));
  return loss;
}

// spec: K4.powersgd a model is trained through the PowerSGD hook
TEST_P(PowerSGD, TrainsAModelWithOneColumn) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    const auto start = loss_after(rank, ranks, 0, all_reduce_hook());
    const auto averaged = loss_after(rank, ranks, 400, all_reduce_hook());
    const auto compressed =
        loss_after(rank, ranks, 400, hook_of(powerSGD_hook, {.start_powerSGD_iter = 10}));
    EXPECT_GT(start, 1);
    EXPECT_LT(averaged, 1e-2);
    EXPECT_LT(compressed, 2e-2);
  });
}

// Each rank's checkpoint suffices to make the following passes bitwise equal.
TEST_P(PowerSGD, GoesOnFromWhatItSaved) {
  on_ranks(GetParam(), [](int rank) {
    for (const bool warm : {true, false}) {
      const PowerSGDOptions options{
          .start_powerSGD_iter = 2, .min_compression_rate = 1, .warm_start = warm};
      const auto state = std::make_shared<PowerSGDState>(options),
                 restored = std::make_shared<PowerSGDState>(options),
                 fresh = std::make_shared<PowerSGDState>(options);
      Bucket bucket;
      const auto pass = [&](const std::shared_ptr<PowerSGDState>& with, int number) {
        return bucket.pass(powerSGD_hook(with),
                           Bucket::gradient(bucket.given.buffer, rank, number));
      };
      for (int number = 0; number < 5; ++number) pass(state, number);
      torch::serialize::OutputArchive out;
      state->save(out);
      std::stringstream file;
      out.save_to(file);
      torch::serialize::InputArchive in;
      in.load_from(file);
      restored->load(in);
      EXPECT_EQ(restored->iteration(), 5);
      const auto first = pass(restored, 4);
      EXPECT_LT(testing::relative_difference(first, mean_of_ranks(first, get_world_size(), 4)),
                1e-15)
          << "averaged: a new model's buckets come after it";
      const auto expected = pass(state, 5);
      EXPECT_TRUE(same_bytes(pass(restored, 5), expected));
      EXPECT_FALSE(same_bytes(pass(fresh, 5), expected));
      EXPECT_TRUE(same_bytes(pass(restored, 6), pass(state, 6)));
    }
  });
}

TEST(PowerSGDHook, RefusesSettingsThatCannotWork) {
  on_ranks(1, [](int) {
    EXPECT_HAS(message_of<DistError>([] { PowerSGDState({.start_powerSGD_iter = 1}); }),
               "start_powerSGD_iter must be at least 2");
    EXPECT_HAS(message_of<DistError>([] { PowerSGDState({.matrix_approximation_rank = 0}); }),
               "matrix_approximation_rank");
    EXPECT_HAS(message_of<DistError>([] { PowerSGDState({.min_compression_rate = 0}); }),
               "min_compression_rate");
    EXPECT_EQ(
        PowerSGDState({.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false})
            .iteration(),
        0);
  });
}

}  // namespace
}  // namespace muster::testing
