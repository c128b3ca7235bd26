// SPDX-License-Identifier: BSD-3-Clause
// A net that no rank holds whole: parameters, gradients and Adam's state are divided among the
// ranks, and a layer is gathered while it is needed. The batch is the same for any number of ranks,
// so the training is that of one process, which the program checks at the end.
//
//   muster run --standalone --nproc-per-node 2 bin/sharded

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "digits/dataset.h"
#include "muster/distributed.h"
#include "muster/parallel.h"

namespace {

namespace nn = torch::nn;
constexpr int kSteps = 40;
constexpr std::int64_t kBatch = 120;

nn::Sequential make_net() {
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 256), nn::ReLU(),
                     nn::Linear(256, 10));
  net->to(torch::kDouble);
  return net;
}

/// Share `part` of a batch that is divided into `parts` equal ones.
Dataset part_of_batch(const Dataset& all, int step, int part, int parts) {
  const std::int64_t share = kBatch / parts;
  const std::int64_t from = (step * kBatch) % (all.size() - kBatch) + part * share;
  return {all.images.narrow(0, from, share).flatten(1), all.labels.narrow(0, from, share)};
}

template <class Model>
void train(Model& model, const nn::Sequential& net, const Dataset& data, int part, int parts) {
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-3));
  for (int step = 0; step < kSteps; ++step) {
    const Dataset batch = part_of_batch(data, step, part, parts);
    optimizer.zero_grad();
    nn::functional::cross_entropy(model->forward(batch.images), batch.labels).backward();
    optimizer.step();
  }
}

std::int64_t elements(const nn::Sequential& net) {
  std::int64_t sum = 0;
  for (const auto& parameter : net->parameters()) sum += parameter.numel();
  return sum;
}

bool check(bool holds, const char* what, double figure) {
  if (muster::get_rank() == 0)
    std::printf("%s %s: %.3g\n", holds ? "ok     " : "FAILED ", what, figure);
  return holds;
}

}  // namespace

int main() {
  muster::init_process_group();
  const int rank = muster::get_rank(), ranks = muster::get_world_size();
  const Dataset data =
      load_digits(std::string(MUSTER_EXAMPLES_DATA) + "/digits.csv").train.to(torch::kDouble);

  nn::Sequential net = make_net();
  const std::int64_t all = elements(net);
  muster::FullyShardedDataParallel<nn::Sequential> model(
      net, {.auto_wrap_policy = muster::module_wrap_policy<nn::LinearImpl>()});
  bool good = check(elements(net) <= all / ranks + all / 20, "this rank's part of the parameters",
                    static_cast<double>(elements(net)) / all);
  auto* trained = &model;
  train(trained, net, data, rank, ranks);

  nn::Sequential alone = make_net();
  train(alone, alone, data, 0, 1);
  const muster::StateDict state = model.state_dict();  // whole, on rank 0
  double difference = 0;
  for (const auto& [name, value] : state)
    difference =
        std::max(difference, (value - alone->named_parameters()[name]).abs().max().item<double>());
  good = check(difference < 1e-9, "like one process: weights differ by", difference) && good;
  muster::destroy_process_group();
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
