// SPDX-License-Identifier: BSD-3-Clause
// A net in two stages on two workers, trained on the handwritten digits with micro-batches: while
// the second stage works on one, the first works on the next. A third worker drives them.
//
//   muster run --standalone --nproc-per-node 3 pipeline [--epochs N]
//
// Activations go straight from stage to stage: the driver holds references to them only. Gradients
// go back the same way by distributed autograd, and an optimizer on each stage's worker applies
// them.
#include <muster/rpc.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../digits/dataset.h"

namespace {

namespace nn = torch::nn;
namespace functional = torch::nn::functional;
namespace rpc = muster::rpc;
namespace dist_autograd = muster::rpc::dist_autograd;

constexpr std::int64_t kBatch = 64;
constexpr std::int64_t kMicroBatch = 16;

void start_alike(nn::Module& module, bool wide) {
  if (wide) module.to(torch::kFloat64);
  const torch::NoGradGuard guard;
  // Weights that do not depend on who makes them: the same here and on the stage's worker.
  std::int64_t number = 1;
  for (auto& parameter : module.parameters()) {
    const auto fan = std::max<std::int64_t>(parameter.numel() / parameter.size(0), 1);
    const auto steps = torch::arange(parameter.numel(), torch::kFloat64) *
                       (0.7548776662466927 + 0.01 * static_cast<double>(number++));
    parameter.copy_(((steps - steps.floor() - 0.5) * (2 / std::sqrt(static_cast<double>(fan))))
                        .view_as(parameter));
  }
}

struct FirstStageImpl : nn::Module {
  explicit FirstStageImpl(bool wide)
      : first(register_module("first", nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)))),
        second(register_module("second", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)))) {
    start_alike(*this, wide);
  }
  torch::Tensor forward(const torch::Tensor& images) {
    const auto x = torch::relu(second(torch::relu(first(images))));
    return functional::max_pool2d(x, functional::MaxPool2dFuncOptions(2)).flatten(1);
  }
  nn::Conv2d first, second;
};

struct SecondStageImpl : nn::Module {
  explicit SecondStageImpl(bool wide)
      : hidden(register_module("hidden", nn::Linear(32 * 4 * 4, 64))),
        out(register_module("out", nn::Linear(64, 10))) {
    start_alike(*this, wide);
  }
  torch::Tensor classify(const torch::Tensor& x) { return out(torch::relu(hidden(x))); }
  /// Fetches its input from the worker that has it.
  torch::Tensor forward(const rpc::RRef<torch::Tensor>& input) { return classify(input.to_here()); }
  nn::Linear hidden, out;
};

struct Pipeline {
  explicit Pipeline(bool wide)
      : first("first/cpu", "first stage", wide), second("second/cpu", "second stage", wide) {}

  /// Nothing waits in here but for the last answers: all micro-batches are under way at once.
  torch::Tensor forward(const torch::Tensor& images) const {
    std::vector<rpc::Future<torch::Tensor>> outputs;
    for (const auto& part : images.split(kMicroBatch))
      outputs.push_back(second.forward_async(first.forward_rref(part)));
    return torch::cat(rpc::wait_all(outputs));
  }
  std::vector<rpc::RRef<torch::Tensor>> parameters() const {
    auto all = first.remote_parameters();
    for (const auto& parameter : second.remote_parameters()) all.push_back(parameter);
    return all;
  }
  rpc::RemoteModule<FirstStageImpl> first;
  rpc::RemoteModule<SecondStageImpl> second;
};

torch::Tensor gradient_of(const rpc::RRef<torch::Tensor>& parameter, std::int64_t context) {
  return dist_autograd::get_gradients(context).at(parameter.local_value());
}

/// The largest difference between the pipeline's gradients and those of one process, relative to
/// the largest gradient.
double gradients_off(const Dataset& data, dist_autograd::Mode mode) {
  const Pipeline pipeline(true);
  FirstStageImpl first(true);
  SecondStageImpl second(true);
  const auto expected_loss =
      functional::cross_entropy(second.classify(first.forward(data.images)), data.labels);
  expected_loss.backward();
  auto weights = first.parameters();
  for (const auto& weight : second.parameters()) weights.push_back(weight);

  const dist_autograd::context context;
  dist_autograd::backward(context.context_id(),
                          {functional::cross_entropy(pipeline.forward(data.images), data.labels)},
                          false, mode);
  const auto parameters = pipeline.parameters();
  double worst = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto got = parameters[i].rpc_sync().call<torch::Tensor>("gradient", context.context_id());
    worst = std::max(
        worst,
        ((got - weights[i].grad()).abs().max() / weights[i].grad().abs().max()).item<double>());
  }
  return worst;
}

double accuracy(const Pipeline& pipeline, const Dataset& data) {
  const auto found = pipeline.forward(data.images).argmax(1);
  return (found == data.labels).to(torch::kFloat64).mean().item<double>();
}

bool report(const std::string& what, bool holds) {
  std::printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
  std::fflush(stdout);
  return holds;
}

bool drive(int epochs) {
  const Split digits = load_digits(std::string(MUSTER_EXAMPLES_DATA) + "/digits.csv");
  std::vector<std::int64_t> order(static_cast<std::size_t>(digits.train.size()));
  std::iota(order.begin(), order.end(), 0);

  bool good = true;
  const auto batch =
      digits.train.select({order.begin(), order.begin() + kBatch}).to(torch::kFloat64);
  for (const auto mode : {dist_autograd::Mode::fast, dist_autograd::Mode::smart}) {
    const double off = gradients_off(batch, mode);
    char text[120];
    std::snprintf(text, sizeof text, "gradients of one process in %s mode: off by %.1e",
                  mode == dist_autograd::Mode::fast ? "FAST" : "SMART", off);
    good = report(text, off < 1e-6) && good;
  }

  const Pipeline pipeline(false);
  rpc::DistributedOptimizer<torch::optim::SGD> optimizer(
      pipeline.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  std::mt19937 random(1);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    std::shuffle(order.begin(), order.end(), random);
    double sum = 0;
    int steps = 0;
    for (auto at = order.begin(); order.end() - at >= kBatch; at += kBatch, ++steps) {
      const auto part = digits.train.select({at, at + kBatch});
      const dist_autograd::context context;
      const auto loss = functional::cross_entropy(pipeline.forward(part.images), part.labels);
      dist_autograd::backward(context.context_id(), {loss});
      optimizer.step(context.context_id());
      sum += loss.item<double>();
    }
    std::printf("epoch %d/%d  loss %.4f\n", epoch + 1, epochs, sum / steps);
    std::fflush(stdout);
  }
  const double right = accuracy(pipeline, digits.held_out);
  return report("held-out accuracy: " + std::to_string(100 * right) + " %", right > 0.95) && good;
}

}  // namespace

int main(int argc, char** argv) {
  const int epochs = argc == 3 && std::string(argv[1]) == "--epochs" ? std::stoi(argv[2]) : 8;
  const char* rank = std::getenv("RANK");
  const char* size = std::getenv("WORLD_SIZE");
  if (rank == nullptr || size == nullptr || std::string(size) != "3") {
    std::fprintf(stderr,
                 "pipeline needs three workers: muster run --standalone --nproc-per-node 3 "
                 "pipeline [--epochs N]\n");
    return 2;
  }
  rpc::register_remote_module<FirstStageImpl, bool>("first stage");
  rpc::register_remote_module<SecondStageImpl, bool>("second stage");
  rpc::register_function("gradient", gradient_of);
  const char* names[] = {"driver", "first", "second"};
  rpc::init_rpc(names[std::stoi(rank) % 3]);
  const bool good = std::stoi(rank) != 0 || drive(epochs);
  rpc::shutdown();
  return good ? 0 : 1;
}
