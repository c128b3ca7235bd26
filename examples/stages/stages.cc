// SPDX-License-Identifier: BSD-3-Clause
// A model in two stages on two devices, trained by all ranks together: DistributedDataParallel
// without device_ids. Each rank drives both of its devices; gradients travel from wherever they
// are.
//
//   stages [--devices cpu,cpu]      on a machine with two GPUs a rank and a group for CUDA tensors:
//       --devices cuda:0,cuda:1
#include <muster/distributed.h>
#include <muster/parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace nn = torch::nn;

constexpr std::int64_t kBatch = 24;
constexpr int kSteps = 120;

using Devices = std::pair<torch::Device, torch::Device>;

Devices parse(int argc, char** argv) {
  if (argc == 1) return {torch::kCPU, torch::kCPU};
  const std::string list = argc == 3 && std::string(argv[1]) == "--devices" ? argv[2] : "";
  const auto comma = list.find(',');
  if (comma == std::string::npos)
    throw std::runtime_error("usage: stages [--devices FIRST,SECOND]");
  return {torch::Device(list.substr(0, comma)), torch::Device(list.substr(comma + 1))};
}

/// A model on two devices: the first one's results go to the second.
struct StagesImpl : nn::Module {
  explicit StagesImpl(const Devices& devices)
      : devices(devices),
        first(register_module("first", nn::Linear(8, 32))),
        second(register_module("second", nn::Linear(32, 2))) {
    to(torch::kFloat64);
    first->to(devices.first);
    second->to(devices.second);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = torch::tanh(first(x.to(devices.first)));
    return second(hidden.to(devices.second));
  }
  Devices devices;
  nn::Linear first, second;
};
TORCH_MODULE(Stages);

/// Points in eight dimensions; to be found are a product and a sum of some of their coordinates.
struct Batch {
  torch::Tensor points, wanted;
};
Batch batch_of(int step) {
  torch::manual_seed(static_cast<std::uint64_t>(step));
  const auto points = torch::rand({kBatch, 8}, torch::kFloat64) * 2 - 1;
  return {
      points,
      torch::stack({points.select(1, 0) * points.select(1, 1), points.narrow(1, 2, 3).sum(1)}, 1)};
}

struct Trained {
  double first_loss = 0, last_loss = 0;
  torch::Tensor weights;  ///< all in one, on the CPU
};

/// `forward` is the model's or that of the model in DistributedDataParallel; it gets rows begin to
/// begin + count of each batch.
template <class Forward>
Trained train(Stages& stages, Forward forward, std::int64_t begin, std::int64_t count) {
  torch::optim::SGD optimizer(stages->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = batch_of(step);
    optimizer.zero_grad();
    const auto output = forward(batch.points.narrow(0, begin, count));
    const auto loss =
        nn::functional::mse_loss(output, batch.wanted.narrow(0, begin, count).to(output.device()));
    loss.backward();
    optimizer.step();
    trained.last_loss = loss.template item<double>();
    if (step == 0) trained.first_loss = trained.last_loss;
  }
  std::vector<torch::Tensor> all;
  for (const auto& parameter : stages->parameters())
    all.push_back(parameter.detach().cpu().reshape({-1}));
  trained.weights = torch::cat(all);
  return trained;
}

Stages stages_on(const Devices& devices) {
  torch::manual_seed(11);
  return Stages(devices);
}

bool report(const char* what, bool holds, const std::string& figure) {
  if (muster::get_rank() == 0)
    std::printf("%s  %s: %s\n", holds ? "ok    " : "FAILED", what, figure.c_str());
  return holds;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", value);
  return text;
}

bool run(const Devices& devices) {
  const int ranks = muster::get_world_size();
  if (kBatch % ranks != 0)
    throw std::runtime_error("a batch of 24 cannot be shared equally by " + std::to_string(ranks) +
                             " ranks");
  const auto share = kBatch / ranks;

  auto stages = stages_on(devices);
  muster::DistributedDataParallel<Stages> model(
      stages);  // no device_ids: the module knows where its stages are
  const auto together = train(
      stages, [&](const torch::Tensor& x) { return model(x); }, muster::get_rank() * share, share);
  auto reference = stages_on(devices);
  const auto alone = train(
      reference, [&](const torch::Tensor& x) { return reference(x); }, 0, kBatch);

  const auto difference =
      ((together.weights - alone.weights).norm() / alone.weights.norm()).item<double>();
  auto rank_0 = together.weights.clone();
  muster::broadcast(rank_0, {.src = 0});
  auto same = torch::tensor({torch::equal(rank_0, together.weights) && difference < 1e-9 ? 1 : 0});
  muster::all_reduce(same, {.op = muster::ReduceOp::MIN});
  bool all_hold = report("like one process on the whole batch", same.item<int>() == 1,
                         "after " + std::to_string(kSteps) + " steps the weights differ by " +
                             number(difference) + ", the ranks' not at all");
  all_hold &= report("the loss falls", alone.last_loss < 0.2 * alone.first_loss,
                     "from " + number(alone.first_loss) + " to " + number(alone.last_loss));
  return all_hold;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto devices = parse(argc, argv);
    at::set_num_threads(1);  // the ranks are the parallelism
    muster::init_process_group();
    const bool all_hold = run(devices);
    muster::destroy_process_group();
    return all_hold ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stages: %s\n", error.what());
    return 1;
  }
}
