// SPDX-License-Identifier: BSD-3-Clause
// Training that goes on when a rank is killed: the other ranks keep their processes.
//
//   muster run --standalone --nproc-per-node 4 --elastic keep --max-restarts 10 --spares 1
//       bin/elastic
//
// Rank 1 kills itself in the middle, once. Kill others meanwhile, by `kill -9`. In the end rank 0
// compares the network with that of one process that nobody disturbed.
#include <muster/distributed.h>
#include <muster/elastic.h>
#include <muster/parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../digits/dataset.h"

namespace {

namespace elastic = muster::elastic;
namespace nn = torch::nn;
constexpr std::int64_t kBatch = 60, kSteps = 200, kDies = 100;

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
  return nn::functional::cross_entropy(model.forward(inputs),
                                       data.labels.slice(0, begin, begin + share));
}

/// How far the network is from that of one process that nobody disturbed.
double distance_from_undisturbed(const nn::Sequential& net, const Dataset& data) {
  nn::Sequential other = make_net();
  torch::optim::Adam optimizer(other->parameters(), torch::optim::AdamOptions(1e-2));
  for (std::int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(*other, data, step, 0, 1).backward();
    optimizer.step();
  }
  double distance = 0;
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    const auto difference = net->parameters()[i] - other->parameters()[i];
    distance = std::max(distance, difference.abs().max().item<double>());
  }
  return distance;
}

}  // namespace

int main() {
  const Dataset data =
      load_digits(std::string(MUSTER_EXAMPLES_DATA) + "/digits.csv").train.to(torch::kDouble);
  nn::Sequential net = make_net();
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
  std::int64_t step = 0;
  elastic::State state;
  state.add_module("net", *net).add_optimizer("optimizer", optimizer, *net);
  state.add_value("step", step);

  bool first_rank = false;
  const auto outcome = elastic::run(state, [&] {
    const int rank = muster::get_rank(), ranks = muster::get_world_size();
    first_rank = rank == 0;
    std::printf("rank %d of %d is in epoch %lld at step %lld\n", rank, ranks,
                static_cast<long long>(elastic::epoch()), static_cast<long long>(step));
    muster::DistributedDataParallel model(net);
    while (step < kSteps) {
      optimizer.zero_grad();
      loss_of(model, data, step, rank, ranks).backward();
      if (rank == 1 && step == kDies && elastic::epoch() == 1) std::raise(SIGKILL);
      optimizer.step();
      ++step;
      state.commit();
    }
  });
  if (outcome == elastic::RunOutcome::preempted) return EXIT_SUCCESS;  // a place to save
  if (!first_rank) return EXIT_SUCCESS;
  const double distance = distance_from_undisturbed(net, data);
  const bool good = distance < 1e-6;
  std::printf("%s the network of one process that nobody disturbed: they differ by %.1e\n",
              good ? "ok     " : "FAILED ", distance);
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
