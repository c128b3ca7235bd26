// SPDX-License-Identifier: BSD-3-Clause
#include "network.h"

#include <muster/distributed.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/pooling.h>

namespace nn = torch::nn;
namespace functional = torch::nn::functional;

NetworkImpl::NetworkImpl()
    : first(register_module("first", nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)))),
      second(register_module("second", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)))),
      hidden(register_module("hidden", nn::Linear(32 * 4 * 4, 64))),
      out(register_module("out", nn::Linear(64, 10))) {}

torch::Tensor NetworkImpl::forward(torch::Tensor images) {
  auto x = torch::relu(first(images));
  x = torch::relu(second(x));
  x = functional::max_pool2d(x, functional::MaxPool2dFuncOptions(2));
  return out(torch::relu(hidden(x.flatten(1))));
}

Trainer::Trainer(Network network, Averaging averaging)
    : network_(std::move(network)),
      shared_(averaging == Averaging::all_ranks
                  ? std::make_unique<muster::DistributedDataParallel<Network>>(network_)
                  : nullptr),
      optimizer_(network_->parameters(),
                 torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-4)) {}

double Trainer::step(const Dataset& share) {
  optimizer_.zero_grad();
  const auto output = shared_ ? shared_->forward(share.images) : network_->forward(share.images);
  const auto loss = functional::cross_entropy(output, share.labels);
  loss.backward();
  optimizer_.step();
  return loss.item<double>();
}

void Trainer::set_learning_rate(double rate) {
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(rate);
}

torch::Tensor flat_weights(const Network& network) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : network->parameters()) flat.push_back(parameter.reshape({-1}));
  return torch::cat(flat);
}

double accuracy(Network& network, const Dataset& data) {
  const torch::NoGradGuard no_grad;
  const int ranks = muster::get_world_size();
  std::vector<std::int64_t> mine;
  for (std::int64_t i = muster::get_rank(); i < data.size(); i += ranks) mine.push_back(i);
  auto right = torch::zeros({}, torch::kInt64);
  if (!mine.empty()) {
    const auto share = data.select(mine);
    right += network->forward(share.images).argmax(1).eq(share.labels).sum();
  }
  muster::all_reduce(right);
  return right.item<double>() / static_cast<double>(data.size());
}
