// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/DeviceAccelerator.h>
#include <muster/parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "programs.h"

namespace documents {
namespace {

using at::Tensor;
/// torch::nn::Linear on any device: `to` of torch's C++ modules moves none to an accelerator that a
/// library has registered.
struct LayerImpl final : torch::nn::Module {
  LayerImpl(std::int64_t inputs, std::int64_t outputs, at::Device device)
      : LayerImpl(*torch::nn::Linear(inputs, outputs), device) {}
  /// A copy of `other`, which is a LayerImpl or a torch::nn::LinearImpl.
  template <class Other>
  LayerImpl(const Other& other, at::Device device)
      : weight(register_parameter("weight", other.weight.detach().clone().to(device))),
        bias(register_parameter("bias", other.bias.detach().clone().to(device))) {}

  Tensor forward(const Tensor& x) { return torch::linear(x, weight, bias); }
  std::shared_ptr<Module> clone(const std::optional<at::Device>& device = {}) const override {
    return std::make_shared<LayerImpl>(*this, device.value_or(weight.device()));
  }
  Tensor weight, bias;
};
TORCH_MODULE(Layer);

struct ToyModelImpl : torch::nn::Module {
  explicit ToyModelImpl(at::Device device) : net1(10, 10, device), net2(10, 5, device) {
    register_module("net1", net1);
    register_module("net2", net2);
  }
  Tensor forward(const Tensor& x) { return net2(torch::relu(net1(x))); }
  Layer net1, net2;
};
TORCH_MODULE(ToyModel);

/// Its outputs are on dev1.
struct ToyMpModelImpl : torch::nn::Module {
  ToyMpModelImpl(at::Device dev0, at::Device dev1)
      : dev0(dev0), dev1(dev1), net1(10, 10, dev0), net2(10, 5, dev1) {
    register_module("net1", net1);
    register_module("net2", net2);
  }
  Tensor forward(const Tensor& x) {
    const auto hidden = torch::relu(net1(x.to(dev0)));
    return net2(hidden.to(dev1));
  }
  at::Device dev0, dev1;
  Layer net1, net2;
};
TORCH_MODULE(ToyMpModel);

/// A step of training; `device`: of the model's outputs.
template <class Model>
void train(muster::DistributedDataParallel<Model>& ddp_model, at::Device device) {
  torch::nn::MSELoss loss_fn;
  torch::optim::SGD optimizer(ddp_model.module()->parameters(), torch::optim::SGDOptions(0.001));

  optimizer.zero_grad();
  const auto outputs = ddp_model(torch::randn({20, 10}));
  const auto labels = torch::randn({20, 5}).to(device);
  loss_fn(outputs, labels).backward();
  optimizer.step();
}

/// The toy model on one device, and a step of it.
void train_on(int device) {
  ToyModel model(accelerator(device));
  muster::DistributedDataParallel<ToyModel> ddp_model(model, {.device_ids = std::vector{device}});
  train(ddp_model, accelerator(device));
}

void setup(int rank, int world_size) {
  setenv("MASTER_ADDR", "localhost", 0);
  setenv("MASTER_PORT", "12355", 0);
  // initialize the process group
  muster::init_process_group({.backend = "gloo", .world_size = world_size, .rank = rank});
}

void demo_basic(int rank, int world_size) {
  say("Running basic DDP example on rank " + std::to_string(rank) + ".");
  setup(rank, world_size);
  train_on(rank);
  muster::destroy_process_group();
}

void demo_checkpoint(int rank, int world_size) {
  say("Running DDP checkpoint example on rank " + std::to_string(rank) + ".");
  setup(rank, world_size);
  ToyModel model(accelerator(rank));
  muster::DistributedDataParallel<ToyModel> ddp_model(model, {.device_ids = std::vector{rank}});

  const auto path = std::filesystem::temp_directory_path() / "model.checkpoint";
  // All processes should see same parameters as they all start from same random parameters and
  // gradients are synchronized in backward passes. Therefore, saving it in one process is
  // sufficient.
  auto states = model->parameters();
  if (rank == 0) torch::save(states, path);

  // Use a barrier() to make sure that process 1 loads the model after process 0 saves it.
  muster::barrier();
  std::vector<Tensor> saved;
  torch::load(saved, path, accelerator(rank));
  for (std::size_t i = 0; i < states.size(); ++i) {
    const at::NoGradGuard no_grad;
    states[i].copy_(saved.at(i));
  }
  train(ddp_model, accelerator(rank));

  // Not necessary to use a barrier() to guard the file deletion below as the AllReduce ops in the
  // backward pass of DDP already served as a synchronization.
  if (rank == 0) std::filesystem::remove(path);
  muster::destroy_process_group();
}

void demo_model_parallel(int rank, int world_size) {
  say("Running DDP with model parallel example on rank " + std::to_string(rank) + ".");
  setup(rank, world_size);

  // setup mp_model and devices for this process
  const auto dev0 = accelerator(rank * 2), dev1 = accelerator(rank * 2 + 1);
  muster::DistributedDataParallel<ToyMpModel> ddp_mp_model(ToyMpModel(dev0, dev1));
  // outputs will be on dev1
  train(ddp_mp_model, dev1);
  muster::destroy_process_group();
}

/// So many processes, with `devices` each.
void run_demo(void (*demo)(int, int), int devices) {
  const int count = at::accelerator::deviceCount();
  if (count < 2)
    throw std::runtime_error("Requires at least 2 GPUs to run, but got " + std::to_string(count));
  const int world_size = count / devices;
  muster::spawn(demo, std::tuple(world_size), {.nprocs = world_size});
}

/// Of a launcher that sets the environment.
void elastic_ddp(const Arguments&) {
  muster::init_process_group({.backend = "gloo"});
  const int rank = muster::get_rank();
  say("Start running basic DDP example on rank " + std::to_string(rank) + ".");

  // create model and move it to GPU with id rank
  train_on(rank % at::accelerator::deviceCount());
  muster::destroy_process_group();
}

/// Of a launcher that sets the environment and gives --local_rank.
void spmd_main(const Arguments& arguments) {
  const int local_world_size = std::stoi(option(arguments, "local_world_size", "1"));
  const int local_rank = std::stoi(option(arguments, "local_rank", "0"));
  const auto pid = "[" + std::to_string(getpid()) + "] ";

  // These are the parameters used to initialize the process group
  std::string env_dict;
  for (const char* key : {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
    env_dict +=
        std::string(env_dict.empty() ? "" : ", ") + "'" + key + "': '" + variable(key) + "'";
  say(pid + "Initializing process group with: {" + env_dict + "}");
  muster::init_process_group({.backend = "gloo"});
  const auto rank = std::to_string(muster::get_rank());
  const auto world_size = std::to_string(muster::get_world_size());
  say(pid + "world_size = " + world_size + ", rank = " + rank +
      ", backend=" + muster::get_backend());

  // setup devices for this process. For local_world_size = 2, num_gpus = 8, rank 0 uses GPUs
  // [0, 1, 2, 3] and rank 1 uses GPUs [4, 5, 6, 7].
  const int n = at::accelerator::deviceCount() / local_world_size;
  std::vector<int> device_ids(static_cast<std::size_t>(n));
  std::iota(device_ids.begin(), device_ids.end(), local_rank * n);
  say(pid + "rank = " + rank + ", world_size = " + world_size + ", n = " + std::to_string(n) +
      ", device_ids = " + text_of(device_ids));

  ToyModel model(accelerator(device_ids.at(0)));
  muster::DistributedDataParallel<ToyModel> ddp_model(model, {.device_ids = device_ids});
  train(ddp_model, accelerator(device_ids.at(0)));

  // Tear down the process group
  muster::destroy_process_group();
}

/// Threads of one process, and no group.
void threads(const Arguments&) {
  const int count = at::accelerator::deviceCount();
  Layer model(10, 5, count > 0 ? accelerator(0) : at::Device(at::kCPU));
  const auto input_var = torch::randn({20, 10});
  const auto expected = model(input_var.to(model->weight.device()));
  muster::DataParallelOptions options;
  if (count > 0) {
    options.device_ids.emplace(static_cast<std::size_t>(std::min(count, 3)));
    std::iota(options.device_ids->begin(), options.device_ids->end(), 0);
  }
  muster::DataParallel<Layer> net(model, options);
  const auto output = net(input_var);  // input_var can be on any device, including CPU
  say(std::string(torch::allclose(output.cpu(), expected.cpu(), 1e-5, 1e-3) ? "True" : "False") +
      " (" + std::to_string(output.size(0)) + ", " + std::to_string(output.size(1)) + ")");
}

}  // namespace

Programs data_parallel() {
  return {{"ddp",
           [](const Arguments&) {
             run_demo(demo_basic, 1);
             run_demo(demo_checkpoint, 1);
           }},
          {"model_parallel", [](const Arguments&) { run_demo(demo_model_parallel, 2); }},
          {"elastic_ddp", elastic_ddp},
          {"spmd_main", spmd_main},
          {"data_parallel", threads}};
}

}  // namespace documents
