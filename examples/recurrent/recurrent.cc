// SPDX-License-Identifier: BSD-3-Clause
// A recurrent net whose two large parts, the table of its input symbols and the decoder to its
// output symbols, live on another worker, as where a table is too large for the trainer. It learns
// to spell a text: given the letters so far, the next one.
//
//   muster run --standalone --nproc-per-node 2 recurrent [--steps N]
//
// Every step is one forward and one backward pass through both workers, and one optimizer step on
// both.
#include <muster/rpc.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "../text/text.h"

namespace {

namespace nn = torch::nn;
namespace rpc = muster::rpc;
namespace dist_autograd = muster::rpc::dist_autograd;

constexpr std::int64_t kSize = 32;
constexpr std::int64_t kLength = 24;
constexpr std::int64_t kBatch = 16;
constexpr double kGood = 2.6;  // who knows the letters' frequencies alone has 3.0

/// Weights that do not depend on who makes them: the same here and on the other worker. In double:
/// gradients are compared.
void start_alike(nn::Module& module) {
  module.to(torch::kFloat64);
  const torch::NoGradGuard guard;
  std::int64_t number = 1;
  for (auto& parameter : module.parameters()) {
    const auto steps = torch::arange(parameter.numel(), torch::kFloat64) *
                       (0.7548776662466927 + 0.01 * static_cast<double>(number++));
    parameter.copy_(((steps - steps.floor() - 0.5) * (2 / std::sqrt(static_cast<double>(kSize))))
                        .view_as(parameter));
  }
}

struct TableImpl : nn::Module {
  explicit TableImpl(std::int64_t symbols)
      : table(register_module("table", nn::Embedding(symbols, kSize))) {
    start_alike(*this);
  }
  torch::Tensor forward(const torch::Tensor& symbols) { return table(symbols); }
  nn::Embedding table;
};

struct DecoderImpl : nn::Module {
  explicit DecoderImpl(std::int64_t symbols)
      : out(register_module("out", nn::Linear(kSize, symbols))) {
    start_alike(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(x); }
  nn::Linear out;
};

struct RecurrentImpl : nn::Module {
  RecurrentImpl()
      : lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(kSize, kSize).batch_first(true)))) {
    start_alike(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return std::get<0>(lstm(x)); }
  nn::LSTM lstm;
};

torch::Tensor loss_of(const torch::Tensor& scores, const Windows& text) {
  return nn::functional::cross_entropy(scores.flatten(0, 1), text.next.flatten());
}

struct Split {
  explicit Split(std::int64_t symbols)
      : table("keeper", "table", symbols), decoder("keeper", "decoder", symbols) {}

  torch::Tensor loss(const Windows& text) {
    return loss_of(decoder.forward(recurrent.forward(table.forward(text.letters))), text);
  }
  std::vector<rpc::RRef<torch::Tensor>> parameters() const {
    auto all = table.remote_parameters();
    for (const auto& parameter : recurrent.parameters()) all.emplace_back(parameter);
    for (const auto& parameter : decoder.remote_parameters()) all.push_back(parameter);
    return all;
  }
  rpc::RemoteModule<TableImpl> table;
  rpc::RemoteModule<DecoderImpl> decoder;
  RecurrentImpl recurrent;
};

torch::Tensor gradient_of(const rpc::RRef<torch::Tensor>& parameter, std::int64_t context) {
  return dist_autograd::get_gradients(context).at(parameter.local_value());
}

/// The largest difference between the gradients of the two workers and those of one process,
/// relative to the largest gradient.
double gradients_off(std::int64_t symbols, const Windows& text, dist_autograd::Mode mode) {
  TableImpl table(symbols);
  RecurrentImpl recurrent;
  DecoderImpl decoder(symbols);
  loss_of(decoder.forward(recurrent.forward(table.forward(text.letters))), text).backward();
  std::vector<torch::Tensor> expected;
  for (const auto& part : {table.parameters(), recurrent.parameters(), decoder.parameters()}) {
    for (const auto& parameter : part) expected.push_back(parameter.grad());
  }

  Split split(symbols);
  const dist_autograd::context context;
  dist_autograd::backward(context.context_id(), {split.loss(text)}, false, mode);
  const auto parameters = split.parameters();
  double worst = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto got = parameters[i].rpc_sync().call<torch::Tensor>("gradient", context.context_id());
    worst =
        std::max(worst, ((got - expected[i]).abs().max() / expected[i].abs().max()).item<double>());
  }
  return worst;
}

bool report(const std::string& what, bool holds) {
  std::printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
  std::fflush(stdout);
  return holds;
}

bool train(int steps) {
  const Text text = load_text(std::string(MUSTER_EXAMPLES_DATA) + "/alice.txt");
  const auto symbols = static_cast<std::int64_t>(text.letters.size());
  // Anywhere in the text, and the same in every run.
  const auto batch_at = [](const torch::Tensor& from, std::int64_t step) {
    const auto starts = (torch::arange(kBatch) * 4001 + step * 1009) % (from.size(0) - kLength - 1);
    return windows_at(from, starts, kLength);
  };

  bool good = true;
  for (const auto mode : {dist_autograd::Mode::fast, dist_autograd::Mode::smart}) {
    const double off = gradients_off(symbols, batch_at(text.train, 0), mode);
    char words[120];
    std::snprintf(words, sizeof words, "gradients of one process in %s mode: off by %.1e",
                  mode == dist_autograd::Mode::fast ? "FAST" : "SMART", off);
    good = report(words, off < 1e-6) && good;
  }

  Split split(symbols);
  rpc::DistributedOptimizer<torch::optim::Adam> optimizer(split.parameters(),
                                                          torch::optim::AdamOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    const dist_autograd::context context;
    const auto loss = split.loss(batch_at(text.train, step));
    dist_autograd::backward(context.context_id(), {loss});
    optimizer.step(context.context_id());
    if (step % 50 == 0) std::printf("step %d/%d  loss %.3f\n", step, steps, loss.item<double>());
  }
  const torch::NoGradGuard guard;
  const double held_out = split.loss(batch_at(text.held_out, 0)).item<double>();
  return report("held-out loss: " + std::to_string(held_out) + " nats a letter",
                held_out < kGood) &&
         good;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc == 3 && std::string(argv[1]) == "--steps" ? std::stoi(argv[2]) : 200;
  const char* rank = std::getenv("RANK");
  const char* size = std::getenv("WORLD_SIZE");
  if (rank == nullptr || size == nullptr || std::string(size) != "2") {
    std::fprintf(stderr,
                 "recurrent needs two workers: muster run --standalone --nproc-per-node 2 "
                 "recurrent [--steps N]\n");
    return 2;
  }
  rpc::register_remote_module<TableImpl, std::int64_t>("table");
  rpc::register_remote_module<DecoderImpl, std::int64_t>("decoder");
  rpc::register_function("gradient", gradient_of);
  const bool trains = std::stoi(rank) == 0;
  rpc::init_rpc(trains ? "trainer" : "keeper");
  const bool good = !trains || train(steps);
  rpc::shutdown();
  return good ? 0 : 1;
}
