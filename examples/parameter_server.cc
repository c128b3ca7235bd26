// SPDX-License-Identifier: BSD-3-Clause
// A parameter server and its trainers. Worker 0 keeps the weights; every other worker has its share
// of the images, computes gradients of its share and sends them. The server replies to no
// worker before all have sent theirs: its function returns a future, which frees the thread, adds
// the gradients up, makes one step, and then replies to all with the new weights. So the run equals
// that of one process with all images, which the server checks at the end.
//
//   muster run --standalone --nproc-per-node 3 bin/parameter_server

#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "digits/dataset.h"
#include "muster/rpc.h"

namespace {

namespace rpc = muster::rpc;
using Tensors = std::vector<at::Tensor>;
constexpr int kSteps = 60;
constexpr double kRate = 0.3;

Tensors first_weights() {
  torch::manual_seed(1);
  return {torch::randn({64, 32}, torch::kDouble) * 0.1, torch::zeros({32}, torch::kDouble),
          torch::randn({32, 10}, torch::kDouble) * 0.1, torch::zeros({10}, torch::kDouble)};
}

at::Tensor scores(const Tensors& weights, const at::Tensor& images) {
  return torch::relu(images.matmul(weights[0]) + weights[1]).matmul(weights[2]) + weights[3];
}

/// Gradients of the sum of the losses, not of their mean: so the shares' gradients add up to that
/// of the whole batch.
Tensors gradients(const Tensors& weights, const at::Tensor& images, const at::Tensor& labels) {
  Tensors leaves;
  for (const auto& weight : weights) leaves.push_back(weight.detach().requires_grad_(true));
  namespace F = torch::nn::functional;
  F::cross_entropy(scores(leaves, images), labels,
                   F::CrossEntropyFuncOptions().reduction(torch::kSum))
      .backward();
  Tensors gradients;
  for (const auto& leaf : leaves) gradients.push_back(leaf.grad());
  return gradients;
}

void step(Tensors& weights, const Tensors& gradients, std::int64_t images) {
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = weights[i] - gradients[i] * (kRate / static_cast<double>(images));
}

class Server {
 public:
  Server(int trainers, std::int64_t images) : trainers_(trainers), images_(images) {}

  rpc::Future<Tensors> hand_in(const Tensors& gradients) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (came_ == 0)
        sum_.push_back(gradients[i]);
      else
        sum_[i] = sum_[i] + gradients[i];
    }
    const auto answer = next_.future();
    if (++came_ == trainers_) {
      step(weights_, sum_, images_);
      next_.set_value(weights_);
      next_ = rpc::Promise<Tensors>();
      sum_.clear();
      came_ = 0;
    }
    return answer;
  }
  Tensors weights() {
    const std::lock_guard lock(mutex_);
    return weights_;
  }

 private:
  const int trainers_;
  const std::int64_t images_;
  std::mutex mutex_;
  Tensors weights_ = first_weights();
  Tensors sum_;
  int came_ = 0;
  rpc::Promise<Tensors> next_;
};

void train(const at::Tensor& images, const at::Tensor& labels) {
  auto weights = rpc::rpc_sync<Tensors>("server", "weights");
  for (int i = 0; i < kSteps; ++i)
    weights = rpc::rpc_sync<Tensors>("server", "hand_in", gradients(weights, images, labels));
}

/// The largest difference from what one process with all images comes to, relative to the largest
/// weight; and how many it recognises.
int check(const Tensors& served, const at::Tensor& images, const at::Tensor& labels) {
  auto weights = first_weights();
  for (int i = 0; i < kSteps; ++i)
    step(weights, gradients(weights, images, labels), images.size(0));
  double difference = 0;
  for (std::size_t i = 0; i < weights.size(); ++i)
    difference = std::max(
        difference, ((weights[i] - served[i]).abs().max() / weights[i].abs().max()).item<double>());
  const auto right =
      (scores(served, images).argmax(1) == labels).to(torch::kDouble).mean().item<double>();
  const bool same = difference < 1e-9;
  std::printf("%s weights like one process's: they differ by %.1e\n", same ? "ok     " : "FAILED ",
              difference);
  std::printf("%s images recognised: %.1f %%\n", right > 0.9 ? "ok     " : "FAILED ", 100 * right);
  return same && right > 0.9 ? 0 : 1;
}

}  // namespace

int main() {
  const auto data = load_digits(MUSTER_EXAMPLES_DATA "/digits.csv").train.to(torch::kDouble);
  const auto images = data.images.flatten(1);
  const char* ranks = std::getenv("WORLD_SIZE");
  const int trainers = (ranks != nullptr ? std::atoi(ranks) : 1) - 1;
  if (trainers < 1) {
    std::fprintf(stderr,
                 "a server and at least one trainer: muster run --standalone --nproc-per-node 3 "
                 "parameter_server\n");
    return 1;
  }
  const auto server = std::make_shared<Server>(trainers, images.size(0));
  rpc::register_function("weights", [server] { return server->weights(); });
  rpc::register_function("hand_in",
                         [server](const Tensors& gradients) { return server->hand_in(gradients); });

  const char* rank_text = std::getenv("RANK");
  const int rank = rank_text != nullptr ? std::atoi(rank_text) : 0;
  rpc::init_rpc(rank == 0 ? "server" : "trainer" + std::to_string(rank));
  // Every trainer has each n-th image.
  if (rank > 0) {
    using torch::indexing::Slice;
    train(images.index({Slice(rank - 1, torch::indexing::None, trainers)}),
          data.labels.index({Slice(rank - 1, torch::indexing::None, trainers)}));
  }
  rpc::shutdown();  // waits until all have called it
  return rank == 0 ? check(server->weights(), images, data.labels) : 0;
}
