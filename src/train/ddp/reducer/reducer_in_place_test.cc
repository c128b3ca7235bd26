// SPDX-License-Identifier: BSD-3-Clause
// Large gradients are reduced separately and in place.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <array>
#include <functional>
#include <stdexcept>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/shared_memory.h"
#include "train/ddp/reducer/reducer.h"

namespace muster::testing {
namespace {

using parallel::Reducer;
using parallel::ReducerOptions;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kAlways = 1, kNever = INT64_MAX;

/// Leaves with three layouts, equal on every rank.
Tensors leaves() {
  const auto leaf = [](std::initializer_list<std::int64_t> shape,
                       at::MemoryFormat format = at::MemoryFormat::Contiguous) {
    return torch::zeros(shape, at::kDouble).contiguous(format).requires_grad_();
  };
  return {leaf({30, 20}), leaf({7}), leaf({4, 3, 5, 2}, at::MemoryFormat::ChannelsLast)};
}

/// A rank's gradient of leaf `index` in pass `pass`.
at::Tensor gradient_of(int rank, std::size_t index, int pass, const at::Tensor& leaf) {
  const auto numbers = torch::arange(leaf.numel(), at::kDouble) +
                       static_cast<double>(31 * rank + 7 * pass + static_cast<int>(index));
  return torch::sin(numbers).view(leaf.sizes());
}

void run_pass(Reducer& reducer, const Tensors& parameters, int rank, int pass,
              const std::vector<bool>& uses = {true, true, true}) {
  reducer.prepare_forward();
  auto loss = torch::zeros({}, at::kDouble).requires_grad_() * 1;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (uses[i]) loss = loss + (parameters[i] * gradient_of(rank, i, pass, parameters[i])).sum();
  reducer.prepare_backward(std::array{loss});
  loss.backward();
}

at::Tensor mean_of(int ranks, std::size_t index, int pass, const at::Tensor& leaf) {
  auto sum = gradient_of(0, index, pass, leaf);
  for (int rank = 1; rank < ranks; ++rank) sum = sum + gradient_of(rank, index, pass, leaf);
  return sum / ranks;
}

void expect_near(const at::Tensor& value, const at::Tensor& expected) {
  ASSERT_TRUE(value.defined());
  EXPECT_LT((value - expected).abs().max().item<double>(), 1e-14);
}

/// `prepare` changes the parameters' state before each pass, on some ranks. `expected` is the
/// number of gradients reduced in place on rank 0 and on rank 1.
void check(int ranks, std::int64_t in_place_bytes, std::array<std::size_t, 2> expected,
           const std::function<void(int rank, Tensors&)>& prepare) {
  on_ranks(ranks, [&](int rank) {
    auto parameters = leaves();
    Reducer reducer(parameters, {.group = new_group(), .in_place_bytes = in_place_bytes});
    for (int pass = 0; pass < 3; ++pass) {
      for (auto& parameter : parameters) parameter.mutable_grad().reset();
      prepare(rank, parameters);
      run_pass(reducer, parameters, rank, pass);
      for (std::size_t i = 0; i < parameters.size(); ++i)
        expect_near(parameters[i].grad(), mean_of(ranks, i, pass, parameters[i]));
      EXPECT_EQ(reducer.in_place(), expected[rank == 1 ? 1 : 0]);
    }
    EXPECT_EQ(reducer.bucket_bytes().size(), in_place_bytes == kAlways ? 3u : 1u);
  });
}

// spec: K2 gradients are averaged
TEST(InPlace, GivesWhatBucketsGive) {
  for (const int ranks : {1, 2, 3, 4}) {
    check(ranks, kAlways, {3, 3}, [](int, Tensors&) {});
    check(ranks, kNever, {0, 0}, [](int, Tensors&) {});
  }
}

TEST(InPlace, GradientsOfLayersDoNotGoThroughBuckets) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::ones({6, 5}, at::kDouble).requires_grad_(),
                             torch::ones({6}, at::kDouble).requires_grad_()};
    Reducer reducer(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    const auto inputs = torch::arange(20, at::kDouble).view({4, 5}) + rank;
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      reducer.prepare_forward();
      const auto loss = torch::linear(inputs, parameters[0], parameters[1]).sum();
      reducer.prepare_backward(std::array{loss});
      loss.backward();
      EXPECT_EQ(reducer.in_place(), 2u);
      expect_near(parameters[0].grad(), (inputs + 0.5 - rank).sum(0).expand({6, 5}));
      expect_near(parameters[1].grad(), torch::full({6}, 4.0, at::kDouble));
    }
  });
}

// spec: K2 gradients are averaged
// So the ranks of a host reduce them where they are, and nothing is copied.
TEST(InPlace, AutogradMakesLargeGradientsInSharedMemory) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::ones({100, 120}, at::kDouble).requires_grad_(),
                             torch::ones({100}, at::kDouble).requires_grad_()};
    Reducer reducer(parameters, {.group = new_group()});
    const auto inputs = torch::arange(480, at::kDouble).view({4, 120}) + rank;
    const auto pass = [&](auto prepare) {
      reducer.prepare_forward();
      const auto loss = torch::linear(inputs, parameters[0], parameters[1]).sum();
      prepare(std::array{loss});
      loss.backward();
      EXPECT_TRUE(in_shared_memory(parameters[0].grad()));
      EXPECT_FALSE(in_shared_memory(parameters[1].grad()))
          << "it is small, and was copied into a bucket";
      EXPECT_FALSE(in_shared_memory(torch::empty({100, 120}, at::kDouble))) << "backward has ended";
    };
    const auto mean = (inputs + 0.5 - rank).sum(0).expand({100, 120});
    pass([&](const auto& outputs) { reducer.prepare_backward(outputs); });
    EXPECT_EQ(reducer.in_place(), 1u);
    expect_near(parameters[0].grad(), mean);
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    pass([&](const auto& outputs) {
      reducer.skip_backward(outputs);
    });  // accumulators are created here
    pass([&](const auto& outputs) { reducer.prepare_backward(outputs); });
    expect_near(parameters[0].grad(), 2 * mean);
  });
}

// As with two models under one loss, and with delayed parameters.
TEST(InPlace, TwoReducersOfOneBackwardBothShare) {
  on_ranks(2, [](int rank) {
    const auto leaf = [](std::int64_t rows) {
      return torch::ones({rows, 120}, at::kDouble).requires_grad_();
    };
    const Tensors parameters{leaf(100), leaf(90)};
    Reducer one({parameters[0]}, {.group = new_group()}),
        two({parameters[1]}, {.group = new_group()});
    const auto inputs = torch::arange(480, at::kDouble).view({4, 120}) + rank;
    for (Reducer* reducer : {&one, &two}) reducer->prepare_forward();
    const auto loss =
        torch::linear(inputs, parameters[0]).sum() + torch::linear(inputs, parameters[1]).sum();
    for (Reducer* reducer : {&one, &two}) reducer->prepare_backward(std::array{loss});
    loss.backward();
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(in_shared_memory(parameter.grad()));
      expect_near(parameter.grad(), (inputs + 0.5 - rank).sum(0).expand(parameter.sizes()));
    }
  });
}

TEST(InPlace, WithBucketViewsNothingElseIsShared) {
  on_ranks(2, [](int) {
    const Tensors parameters{torch::ones({100, 120}, at::kDouble).requires_grad_()};
    Reducer reducer(parameters, {.group = new_group(), .gradient_as_bucket_view = true});
    reducer.prepare_forward();
    const auto inner = parameters[0] * 2;
    inner.register_hook([](const at::Tensor&) {
      EXPECT_FALSE(in_shared_memory(torch::empty({100, 120}, at::kDouble)));
    });
    const auto loss = inner.sum() * 1;
    reducer.prepare_backward(std::array{loss});
    loss.backward();
  });
}

TEST(InPlace, AfterABackwardThatThrowsTensorsArePrivateAgain) {
  on_ranks(2, [](int) {
    const Tensors parameters{torch::ones({100, 120}, at::kDouble).requires_grad_()};
    Reducer reducer(parameters, {.group = new_group()});
    reducer.prepare_forward();
    const auto inner = parameters[0] * 2;
    inner.register_hook([](const at::Tensor&) {
      EXPECT_TRUE(in_shared_memory(torch::empty({100, 120}, at::kDouble)));
      throw std::runtime_error("in the middle");
    });
    const auto loss = inner.sum() * 1;
    reducer.prepare_backward(std::array{loss});
    EXPECT_ANY_THROW(loss.backward());
    EXPECT_FALSE(in_shared_memory(torch::empty({100, 120}, at::kDouble)));
  });
}

TEST(InPlace, AGradientThatLiesOtherwiseOnOneRankIsCopied) {
  check(2, kAlways, {2, 2}, [](int rank, Tensors& parameters) {
    if (rank == 1) parameters[0].mutable_grad() = torch::zeros({20, 30}, at::kDouble).t();
    if (rank == 0) parameters[2].mutable_grad() = torch::zeros({4, 3, 5, 2}, at::kDouble);
  });
}

TEST(InPlace, AGradientWhoseMemoryOthersHoldIsCopied) {
  check(2, kAlways, {1, 3}, [](int rank, Tensors& parameters) {
    if (rank == 1) return;
    const auto both = torch::zeros({607}, at::kDouble);
    parameters[0].mutable_grad() = both.narrow(0, 0, 600).view({30, 20});
    parameters[1].mutable_grad() = both.narrow(0, 600, 7);
  });
}

TEST(InPlace, GradientsOfSeveralPassesAddUpFirst) {
  on_ranks(2, [](int rank) {
    auto parameters = leaves();
    Reducer reducer(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    run_pass(reducer, parameters, rank, 0);
    run_pass(reducer, parameters, rank, 1);  // added to the averages of the first
    for (std::size_t i = 0; i < parameters.size(); ++i)
      expect_near(parameters[i].grad(),
                  mean_of(2, i, 0, parameters[i]) + mean_of(2, i, 1, parameters[i]));
  });
}

// Parameters in low precision during a pass are still reduced in the configured dtype.
TEST(InPlace, ANarrowGradientTravelsAsReduceDtypeSays) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::zeros({40}, at::kFloat).requires_grad_(),
                             torch::zeros({30}, at::kFloat).requires_grad_()};
    Reducer reducer(parameters, {.group = new_group(),
                                 .in_place_bytes = kAlways,
                                 .find_unused_parameters = true,
                                 .reduce_dtype = at::kFloat});
    reducer.prepare_forward();
    auto loss = (parameters[0] * (1.0f + static_cast<float>(rank) / 1024)).sum();
    if (rank == 0) loss = loss + parameters[1].sum();  // the other rank contributes float32 zeros
    reducer.prepare_backward(std::array{loss});
    loss.backward();
    EXPECT_EQ(reducer.in_place(), rank == 0 ? 2u : 1u);
    expect_near(parameters[0].grad(), torch::full({40}, 1.0f + 1.0f / 2048));
    expect_near(parameters[1].grad(), torch::full({30}, 0.5f));
  });
}

// Both reducers read the gradient when it arrives; neither may overwrite it before the other has
// read it.
TEST(InPlace, AParameterOfTwoReducersIsCopiedByBoth) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::zeros({50}, at::kDouble).requires_grad_()};
    Reducer one(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    Reducer two(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    const auto loss = (parameters[0] * (rank + 1)).sum();
    for (Reducer* reducer : {&one, &two}) {
      reducer->prepare_forward();
      reducer->prepare_backward(std::array{loss});
    }
    loss.backward();
    EXPECT_EQ(one.in_place() + two.in_place(), 0u);
    expect_near(parameters[0].grad(), torch::full({50}, 1.5, at::kDouble));
  });
}

// Small parameters before and after large ones: no bucket waits for the first layer's gradients.
TEST(InPlace, BucketsStandInTheOrderInWhichTheyAreComplete) {
  on_ranks(1, [](int) {
    const auto leaf = [](std::int64_t elements) {
      return torch::zeros({elements}, at::kDouble).requires_grad_();
    };
    Reducer reducer({leaf(4), leaf(100), leaf(200), leaf(5)},
                    {.group = new_group(), .in_place_bytes = 800, .find_unused_parameters = true});
    EXPECT_EQ(reducer.bucket_bytes(), (std::vector<std::int64_t>{1600, 800, 72}));
  });
}

// spec: K1.find_unused_parameters find_unused_parameters
TEST(InPlace, WhatNobodyUsesKeepsItsGradient) {
  on_ranks(2, [](int rank) {
    auto parameters = leaves();
    Reducer reducer(
        parameters,
        {.group = new_group(), .in_place_bytes = kAlways, .find_unused_parameters = true});
    const auto kept = torch::full({30, 20}, rank + 5.0, at::kDouble);
    parameters[0].mutable_grad() = kept.clone();
    run_pass(reducer, parameters, rank, 0, {false, true, rank == 1});
    EXPECT_SAME(parameters[0].grad(), kept);
    expect_near(parameters[1].grad(), mean_of(2, 1, 0, parameters[1]));
    expect_near(parameters[2].grad(), gradient_of(1, 2, 0, parameters[2]) / 2);
  });
}

// spec: K7 ranks without input take part with zeros, and the divisor is given
TEST(InPlace, ARankWithoutInputGetsTheAverages) {
  on_ranks(3, [](int rank) {
    auto parameters = leaves();
    Reducer reducer(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    reducer.set_divisor(2);
    for (int pass = 0; pass < 2; ++pass) {
      for (auto& parameter : parameters) parameter.mutable_grad().reset();
      if (rank == 2) {
        reducer.prepare_forward();
        reducer.shadow_backward();
      } else {
        run_pass(reducer, parameters, rank, pass);
      }
      for (std::size_t i = 0; i < parameters.size(); ++i)
        expect_near(parameters[i].grad(), mean_of(2, i, pass, parameters[i]));
    }
  });
}

TEST(InPlace, AHookIsGivenBucketsAllTheSame) {
  on_ranks(2, [](int rank) {
    auto parameters = leaves();
    Reducer reducer(parameters, {.group = new_group(), .in_place_bytes = kAlways});
    std::size_t gradients = 0;
    reducer.set_hook([&, plain = all_reduce_hook(nullptr)](const GradBucket& bucket) {
      gradients = bucket.gradients.size();
      return plain(bucket);
    });
    run_pass(reducer, parameters, rank, 0);
    EXPECT_EQ(gradients, 3u);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      expect_near(parameters[i].grad(), mean_of(2, i, 0, parameters[i]));
  });
}

}  // namespace
}  // namespace muster::testing
