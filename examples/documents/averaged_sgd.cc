// SPDX-License-Identifier: BSD-3-Clause
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <utility>

#include "../digits/dataset.h"
#include "programs.h"

namespace documents {
namespace {

/// The images of this rank, and how many make a batch.
std::pair<Dataset, std::int64_t> partition_dataset() {
  const auto all = load_digits(std::string(MUSTER_EXAMPLES_DATA) + "/digits.csv").train;
  const int size = muster::get_world_size();
  std::vector<std::int64_t> mine;
  for (std::int64_t i = muster::get_rank(); i < all.size(); i += size) mine.push_back(i);
  return {all.select(mine), 128 / size};
}

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(64, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 10), torch::nn::LogSoftmax(1));
}

/// Gradient averaging.
void average_gradients(const torch::nn::Sequential& model) {
  const auto size = static_cast<double>(muster::get_world_size());
  for (const auto& param : model->parameters()) {
    auto gradient = param.grad();
    muster::all_reduce(gradient, {.op = muster::ReduceOp::SUM});
    gradient /= size;
  }
}

/// Distributed synchronous SGD by hand, of a launcher that sets the environment.
void train_by_hand(const Arguments&) {
  muster::init_process_group({.backend = "gloo"});
  torch::manual_seed(1234);
  const auto [train_set, bsz] = partition_dataset();
  auto model = make_net();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));

  const auto num_batches = (train_set.size() + bsz - 1) / bsz;
  for (int epoch = 0; epoch < 10; ++epoch) {
    double epoch_loss = 0;
    for (const auto& batch : torch::randperm(train_set.size(), torch::kInt64).split(bsz)) {
      const auto data = train_set.images.index_select(0, batch).flatten(1);
      const auto target = train_set.labels.index_select(0, batch);
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::nll_loss(model->forward(data), target);
      epoch_loss += loss.item<double>();
      loss.backward();
      average_gradients(model);
      optimizer.step();
    }
    say("Rank  " + std::to_string(muster::get_rank()) + " , epoch  " + std::to_string(epoch) +
        " :  " + std::to_string(epoch_loss / static_cast<double>(num_batches)));
  }
  muster::destroy_process_group();
}

}  // namespace

Programs averaged_sgd() { return {{"averaged_sgd", train_by_hand}}; }

}  // namespace documents
