// SPDX-License-Identifier: BSD-3-Clause
#include <muster/debug.h>
#include <muster/parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <latch>
#include <utility>

#include "programs.h"

namespace documents {
namespace {

using std::chrono::seconds;

/// Makes the call, which is to fail, and prints its error where it is wanted.
template <class Call>
void show_error(bool shown, Call&& call) {
  try {
    call();
  } catch (const muster::DistError& error) {
    if (shown) say(error.what());
  }
}

/// Rank 1 does not come to the first barrier; rank 0 alone comes to the other, which names all.
void monitored_barrier(int rank) {
  static std::latch told(3);  // a rank that waits for nothing stays until the others know
  const auto group = muster::new_group();
  if (rank != 1)
    show_error(rank == 0,
               [&] { muster::monitored_barrier({.group = group, .timeout = seconds(2)}); });
  if (rank == 0)
    show_error(true,
               [] { muster::monitored_barrier({.timeout = seconds(2), .wait_all_ranks = true}); });
  told.arrive_and_wait();
}

/// all_reduce of 10 and of 20 elements, at DETAIL.
void mismatched_shapes(int rank) {
  muster::set_debug_level(muster::DebugLevel::DETAIL);
  const auto group = muster::new_group();
  show_error(true,
             [&] { muster::all_reduce(torch::randn({rank == 0 ? 10 : 20}), {.group = group}); });
}

struct TwoLinLayerNetImpl : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(bare(10)));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(bare(1)));

  static torch::nn::LinearOptions bare(std::int64_t outputs) {
    return torch::nn::LinearOptions(10, outputs).bias(false);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
};
TORCH_MODULE(TwoLinLayerNet);

/// The loss leaves out what the first layer gives.
void unused_parameters(int rank) {
  muster::set_debug_level(muster::DebugLevel::DETAIL);
  muster::DistributedDataParallel model{TwoLinLayerNet()};
  show_error(rank == 0, [&] {
    for (int step = 0; step < 2; ++step) model(torch::randn({10, 10})).second.sum().backward();
  });
}

/// The reference's net of two layers; both have part in the loss.
void two_layer_net(int rank) {
  muster::DistributedDataParallel model{TwoLinLayerNet()};
  for (int step = 0; step < 20; ++step) {
    const auto [first, second] = model(torch::randn({10, 10}));
    (first + second).sum().backward();
  }
  const auto gradient = model.module()->a->weight.grad();
  say("Rank " + std::to_string(rank) + " has gradients of " + std::to_string(gradient.numel()) +
      " weights");
}

}  // namespace

Programs debugging() {
  return {{"monitored_barrier", on_threads(3, monitored_barrier, /*destroys=*/false)},
          {"mismatched_shapes", on_threads(2, mismatched_shapes, /*destroys=*/false)},
          {"two_layer_net", on_threads(2, two_layer_net)},
          {"unused_parameters", on_threads(2, unused_parameters, /*destroys=*/false)}};
}

}  // namespace documents
