// SPDX-License-Identifier: BSD-3-Clause
// Two ranks fit y = 3x - 1: each computes on its own points, the gradients are averaged.
#include <muster/distributed.h>
#include <torch/types.h>

#include <cstdio>

int main() {
  muster::init_process_group();
  const int rank = muster::get_rank();
  const int world_size = muster::get_world_size();

  const auto x = torch::linspace(-1, 1, 64).slice(0, rank, 64, world_size);
  const auto y = 3 * x - 1;
  auto weight = torch::zeros({}, torch::requires_grad());
  auto bias = torch::zeros({}, torch::requires_grad());
  for (int step = 0; step < 200; ++step) {
    (weight * x + bias - y).square().mean().backward();
    for (auto& parameter : {weight, bias}) {
      muster::all_reduce(parameter.grad(), {.op = muster::ReduceOp::AVG});
      parameter.data().sub_(parameter.grad(), 0.3);
      parameter.grad().zero_();
    }
  }

  // The same bits everywhere, and the right ones.
  const auto mine = torch::stack({weight, bias}).detach();
  std::vector<torch::Tensor> all(world_size);
  for (auto& tensor : all) tensor = torch::empty_like(mine);
  muster::all_gather(all, mine);
  bool good = torch::allclose(mine, torch::tensor({3.0f, -1.0f}), 1e-3, 1e-3);
  for (const auto& theirs : all) good = good && torch::equal(mine, theirs);
  if (rank == 0)
    std::printf("%d ranks: y = %.4f x %+.4f\n", world_size, weight.item<float>(),
                bias.item<float>());
  muster::destroy_process_group();
  return good && world_size == 2 ? 0 : 1;
}
