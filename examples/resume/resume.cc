// SPDX-License-Identifier: BSD-3-Clause
// Training that stops and goes on with another number of ranks: a sharded model, its optimizer and
// the count of steps in a checkpoint.
//
//   muster run --standalone --nproc-per-node 4 bin/resume FOLDER    begins, trains 20 steps, saves
//   muster run --standalone --nproc-per-node 2 bin/resume FOLDER    goes on for 20 more
//   muster run --standalone --nproc-per-node 3 bin/resume FOLDER    and 20 more
//
// Every batch of 60 is shared equally, so the losses are those of one process that never stopped:
// rank 0 is that process too, and compares.
#include <muster/checkpoint.h>
#include <muster/distributed.h>
#include <muster/parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../digits/dataset.h"

namespace {

namespace nn = torch::nn;
constexpr std::int64_t kBatch = 60, kSteps = 20;

nn::Sequential make_net() {
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(64, 96), nn::ReLU(), nn::Linear(96, 10));
  net->to(torch::kDouble);
  return net;
}

/// One rank's share of the step's batch: the loss of it.
template <class Model>
torch::Tensor loss_of(Model& model, const Dataset& data, std::int64_t step, int rank, int ranks) {
  const std::int64_t share = kBatch / ranks;
  const std::int64_t begin = step * kBatch % (data.labels.size(0) - kBatch) + rank * share;
  const auto inputs = data.images.slice(0, begin, begin + share).flatten(1);
  return nn::functional::cross_entropy(model->forward(inputs),
                                       data.labels.slice(0, begin, begin + share));
}

/// The losses of one process that never stops, step by step.
std::vector<double> undivided(const Dataset& data, std::int64_t steps) {
  nn::Sequential net = make_net();
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(net, data, step, 0, 1);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) {
    std::fprintf(stderr, "resume FOLDER: where the checkpoints lie\n");
    return EXIT_FAILURE;
  }
  const std::string folder = words[1];
  muster::init_process_group();
  const int rank = muster::get_rank(), ranks = muster::get_world_size();
  const Dataset data =
      load_digits(std::string(MUSTER_EXAMPLES_DATA) + "/digits.csv").train.to(torch::kDouble);

  nn::Sequential net = make_net();
  muster::FullyShardedDataParallel<nn::Sequential> model(
      net, {.auto_wrap_policy = muster::module_wrap_policy<nn::LinearImpl>()});
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
  std::int64_t step = 0;

  muster::checkpoint::State state;
  state.add_module("model", *net).add_optimizer("optimizer", optimizer, *net);
  state.add_value("step", step);
  if (const auto newest = muster::checkpoint::latest(folder)) {
    muster::checkpoint::load(state, *newest);
    if (rank == 0)
      std::printf("%d ranks go on at step %lld\n", ranks, static_cast<long long>(step));
  }

  auto* trained = &model;
  std::vector<double> losses;
  for (const std::int64_t end = step + kSteps; step < end; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(trained, data, step, rank, ranks);
    loss.backward();
    optimizer.step();
    auto mean = loss.detach().clone();
    muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
    losses.push_back(mean.item<double>());
  }
  muster::checkpoint::save(state, folder + "/step-" + std::to_string(step),
                           {.step = step, .keep_last = 2});

  bool good = true;
  if (rank == 0) {
    const auto expected = undivided(data, step);
    double difference = 0;
    for (std::size_t i = 0; i < losses.size(); ++i)
      difference =
          std::max(difference, std::abs(losses[i] - expected[expected.size() - losses.size() + i]));
    good = difference < 1e-6;
    std::printf("loss %.4f at step %lld\n", losses.back(), static_cast<long long>(step));
    std::printf("%s the losses of one process that never stopped: they differ by %.1e\n",
                good ? "ok     " : "FAILED ", difference);
  }
  muster::destroy_process_group();
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
