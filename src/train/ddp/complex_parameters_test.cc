// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing::complex_parameters {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

at::Tensor waves(at::IntArrayRef sizes, double salt) {
  const auto numbers = torch::arange(c10::multiply_integers(sizes), at::kDouble) + salt;
  return torch::complex(torch::sin(numbers * 12.9), torch::cos(numbers * 7.3)).view(sizes) * 0.4;
}

/// Real inputs, complex parameters.
struct WavesImpl : nn::Module {
  WavesImpl()
      : in(register_module("in", nn::Linear(nn::LinearOptions(4, 6).bias(false)))),
        turn(register_parameter("turn", waves({6, 9}, 1))),
        phase(register_parameter("phase", waves({9}, 2))) {
    to_double();
  }
  void to_double() {
    const torch::NoGradGuard no_grad;
    in->to(at::kDouble);
    in->weight.copy_(at::real(waves({6, 4}, 3)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::abs(at::matmul(torch::tanh(in(x)).to(at::kComplexDouble), turn) * phase + phase);
  }
  nn::Linear in;
  at::Tensor turn, phase;
};
TORCH_MODULE(Waves);

at::Tensor rows_of(int rank, int step) {
  return torch::sin(torch::arange(20, at::kDouble) * (rank + 1.5) + step).view({5, 4});
}
torch::optim::SGDOptions sgd() { return torch::optim::SGDOptions(0.3).momentum(0.5); }

/// All values of some parameters.
at::Tensor parts_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& each : parameters)
    parts.push_back(
        (each.is_complex() ? at::view_as_real(each.detach()) : each.detach()).reshape({-1}));
  return at::cat(parts);
}
double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

constexpr int kSteps = 4;

at::Tensor trained_alone(int ranks) {
  Waves net;
  torch::optim::SGD optimizer(net->parameters(), sgd());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (net(rows_of(rank, step)).square().mean() / ranks).backward();
    optimizer.step();
  }
  return parts_of(net->parameters());
}

template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int rank) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    model(rows_of(rank, step)).square().mean().backward();
    optimizer.step();
  }
}

// spec: K1.complex K2 complex parameters with every option
TEST(ComplexParameters, TrainAsInOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    const auto alone = trained_alone(ranks);
    const std::vector<Options> variants{
        {},
        {.bucket_cap_mb = 0.00001, .gradient_as_bucket_view = true},
        {.find_unused_parameters = true},
        {.static_graph = true},
        {.mixed_precision = MixedPrecision{.reduce_dtype = at::kDouble}}};
    for (const Options& options : variants)
      on_ranks(ranks, [&](int rank) {
        Waves net;
        DistributedDataParallel<Waves> model(net, options);
        torch::optim::SGD optimizer(net->parameters(), sgd());
        train(model, optimizer, rank);
        EXPECT_LT(largest_difference(parts_of(net->parameters()), alone), 1e-12);
      });
    on_ranks(ranks, [&](int rank) {
      Waves net;
      DistributedDataParallel<Waves> model(
          net, {.delay_all_reduce_named_params = {{"turn", net->turn}, {"phase", net->phase}},
                .param_to_hook_all_reduce = net->in->weight});
      torch::optim::SGD optimizer(net->parameters(), sgd());
      train(model, optimizer, rank);
      EXPECT_LT(largest_difference(parts_of(net->parameters()), alone), 1e-12);
    });
  }
}

// spec: K4.imaginary communication hooks keep imaginary parts
TEST(ComplexParameters, GoThroughEveryHook) {
  const auto alone = trained_alone(2);
  const auto exact = [] {
    return std::make_shared<PowerSGDState>(PowerSGDOptions{
        .matrix_approximation_rank = 1000, .start_powerSGD_iter = 2, .min_compression_rate = 1e-9});
  };
  // With 16 bits the result is close, otherwise equal up to rounding. Averaging after every local
  // step equals averaging gradients.
  const std::vector<std::pair<std::function<CommHook()>, double>> hooks{
      {[] { return all_reduce_hook(); }, 1e-12},
      {[] { return fp16_compress_hook(); }, 5e-3},
      {[] { return bf16_compress_hook(); }, 5e-2},
      {[&] { return powerSGD_hook(exact()); }, 1e-9},
      {[&] { return batched_powerSGD_hook(exact()); }, 1e-9},
      {[] {
         return post_localSGD_hook(
             std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{.start_localSGD_iter = 100}));
       },
       1e-12}};
  for (std::size_t which = 0; which < hooks.size(); ++which)
    on_ranks(2, [&](int rank) {
      Waves net;
      DistributedDataParallel<Waves> model(net, {.bucket_cap_mb = 0.00001});
      model.register_comm_hook(hooks[which].first());
      torch::optim::SGD optimizer(net->parameters(), sgd());
      train(model, optimizer, rank);
      EXPECT_LT(largest_difference(parts_of(net->parameters()), alone), hooks[which].second)
          << "hook " << which;
    });
}

// spec: K4 post-local SGD and model averaging keep imaginary parts
TEST(ComplexParameters, AreAveraged) {
  on_ranks(2, [](int rank) {
    Waves net;
    const auto before = parts_of(net->parameters());
    DistributedDataParallel<Waves> model(net);
    model.register_comm_hook(post_localSGD_hook(std::make_shared<PostLocalSGDState>(
        PostLocalSGDOptions{.subgroup = new_group({.ranks = std::vector<int>{rank},
                                                   .use_local_synchronization = true}),
                            .start_localSGD_iter = 0})));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.3));
    model(rows_of(rank, 0)).square().mean().backward();
    optimizer.step();
    PeriodicModelAverager averager({.period = 1});
    averager.average_parameters(optimizer);
    // One step from the same point: the average of the steps is the step of the averages.
    Waves other;
    torch::optim::SGD whole(other->parameters(), torch::optim::SGDOptions(0.3));
    for (int each = 0; each < 2; ++each) (other(rows_of(each, 0)).square().mean() / 2).backward();
    whole.step();
    EXPECT_LT(largest_difference(parts_of(net->parameters()), parts_of(other->parameters())),
              1e-12);
    EXPECT_GT(largest_difference(parts_of(net->parameters()), before), 1e-3);
  });
}

// spec: K8 complex parameters, with the step within backward too
TEST(ComplexParameters, OfADividedOptimizer) {
  const auto alone = trained_alone(2);
  for (const bool as_view : {false, true})
    for (const bool overlap : {false, true})
      on_ranks(2, [&](int rank) {
        Waves net;
        DistributedDataParallel<Waves> model(net, {.bucket_cap_mb = 0.00001});
        ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
            net->parameters(), sgd(),
            {.parameters_as_bucket_view = as_view, .overlap_with_ddp = overlap});
        if (overlap) model.register_comm_hook(hook_with_zero_step(all_reduce_hook(), optimizer));
        train(model, optimizer, rank);
        EXPECT_LT(largest_difference(parts_of(net->parameters()), alone), 1e-12);
      });
}

// spec: K7 complex parameters inside a Join
TEST(ComplexParameters, MayHaveUnevenInputs) {
  on_ranks(2, [](int rank) {
    Waves net, other;
    DistributedDataParallel<Waves> model(net);
    torch::optim::SGD optimizer(net->parameters(), sgd()), alone(other->parameters(), sgd());
    auto join = model.join();
    join.run([&] {
      for (int step = 0; step < 1 + rank; ++step) {
        optimizer.zero_grad();
        model(rows_of(rank, step)).square().mean().backward();
        optimizer.step();
      }
    });
    for (int step = 0; step < 2; ++step) {
      alone.zero_grad();
      for (int each = step; each < 2; ++each)
        (other(rows_of(each, step)).square().mean() / 2).backward();
      alone.step();
    }
    EXPECT_LT(largest_difference(parts_of(net->parameters()), parts_of(other->parameters())),
              1e-12);
  });
}

// spec: M1 M2 M3 complex parameters
TEST(ComplexParameters, AreSharded) {
  for (const int ranks : {1, 2, 3}) {
    const auto alone = trained_alone(ranks);
    on_ranks(ranks, [&](int rank) {
      Waves net;
      FullyShardedDataParallel<Waves> model(net);
      torch::optim::SGD optimizer(net->parameters(), sgd());
      train(model, optimizer, rank);
      std::vector<at::Tensor> whole;
      for (const auto& [name, value] : model.state_dict(false)) whole.push_back(value);
      EXPECT_LT(largest_difference(parts_of(whole), alone), 1e-12);
      model.load_state_dict(model.state_dict(false));
    });
  }
}

}  // namespace
}  // namespace muster::testing::complex_parameters
