// SPDX-License-Identifier: BSD-3-Clause
/// The net, and one rank's part in training it.
#pragma once

#include <muster/parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "dataset.h"

/// Two convolutions and two linear layers: 38,282 parameters.
struct NetworkImpl : torch::nn::Module {
  NetworkImpl();
  torch::Tensor forward(torch::Tensor images);

  torch::nn::Conv2d first, second;
  torch::nn::Linear hidden, out;
};
TORCH_MODULE(Network);

/// Whose gradients a trainer averages with its own.
enum class Averaging { nobody, all_ranks };

class Trainer {
 public:
  /// Takes rank 0's initial weights on every rank where it averages with them.
  Trainer(Network network, Averaging averaging);

  /// One step on this rank's share of the batch. Returns the share's mean loss.
  double step(const Dataset& share);
  /// For one pass over shares that are not of equal size. Not for Averaging::nobody.
  muster::Join join() { return shared_->join(); }
  void set_learning_rate(double rate);
  Network& network() { return network_; }

 private:
  Network network_;
  std::unique_ptr<muster::DistributedDataParallel<Network>> shared_;  // null: alone
  torch::optim::SGD optimizer_;
};

/// All parameters in one flat tensor: a copy.
torch::Tensor flat_weights(const Network& network);
/// The fraction of `data` that is recognised; the ranks share the work. The same on all.
double accuracy(Network& network, const Dataset& data);
