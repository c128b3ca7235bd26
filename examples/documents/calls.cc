// SPDX-License-Identifier: BSD-3-Clause
#include <muster/rpc.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <cmath>

#include "programs.h"

namespace documents {
namespace {

namespace rpc = muster::rpc;
namespace dist_autograd = muster::rpc::dist_autograd;
using at::Tensor;

std::string text_of_size(const std::vector<std::int64_t>& size) {
  std::string text;
  for (const auto each : size) text += (text.empty() ? "" : ", ") + std::to_string(each);
  return "torch.Size([" + text + "])";
}

/// As Python prints `tensor.tolist()` of a matrix of whole floating-point numbers.
std::string list_of(const Tensor& matrix) {
  std::string text;
  for (const auto& row : matrix.unbind()) {
    std::string numbers;
    for (const auto& each : row.unbind())
      numbers +=
          (numbers.empty() ? "" : ", ") + std::to_string(std::lround(each.item<double>())) + ".0";
    text += (text.empty() ? "[" : ", [") + numbers + "]";
  }
  return "[" + text + "]";
}

// on both workers
std::vector<std::int64_t> size_of(const rpc::RRef<Tensor>& held) {
  return held.local_value().sizes().vec();
}
Tensor view(const rpc::RRef<Tensor>& held, std::int64_t rows, std::int64_t columns) {
  return held.local_value().view({rows, columns});
}
std::vector<Tensor> add(const Tensor& x, std::int64_t y) {
  say(text_of(x));
  return {x + y, (x + y).to(accelerator(2))};
}

void caller() {
  const auto ones = torch::ones({2});
  say(text_of(rpc::rpc_sync<Tensor>("worker1", "aten::add", ones, 3)));
  say(text_of(rpc::rpc_async<Tensor>("worker1", "aten::add", ones, 3).wait()));
  const auto rref1 = rpc::remote<Tensor>("worker1", "aten::add", ones, 3);
  const auto rref2 = rpc::remote<Tensor>("worker1", "aten::add", ones, 1);
  say(text_of(rref1.to_here() + rref2.to_here()));

  const auto rref = rpc::remote<Tensor>("worker1", "aten::add", torch::zeros({2, 2}), 1);
  using Size = std::vector<std::int64_t>;
  say(text_of_size(rref.remote().call<Size>("size").to_here()));
  say(text_of(rref.remote().call<Tensor>("view", 1, 4).to_here()));
  say(text_of(rref.rpc_async().call<Tensor>("view", 1, 4).wait()));
  say(text_of_size(rref.rpc_sync().call<Size>("size")));

  const rpc::RemoteModule<torch::nn::LinearImpl> remote_linear_module("worker1/cpu", "linear", 20,
                                                                      30);
  say(text_of_size(
      remote_linear_module.forward_async(torch::randn({128, 20})).wait().sizes().vec()));

  const dist_autograd::context context;
  const auto t1 = torch::rand({3, 3}).requires_grad_();
  const auto t2 = torch::rand({3, 3}).requires_grad_();
  const auto loss = rpc::rpc_sync<Tensor>("worker1", "aten::add", t1, t2).sum();
  dist_autograd::backward(context.context_id(), {loss});
  const auto grads = dist_autograd::get_gradients(context.context_id());
  say(list_of(grads.at(t1)) + " " + list_of(grads.at(t2)));
}

/// One of two workers, of a launcher that sets RANK.
void calls_to_a_worker(const Arguments&) {
  const int rank = std::stoi(variable("RANK"));
  rpc::register_function("size", size_of);
  rpc::register_function("view", view);
  rpc::register_remote_module<torch::nn::LinearImpl, std::int64_t, std::int64_t>("linear");
  rpc::init_rpc("worker" + std::to_string(rank), {.rank = rank, .world_size = 2});
  if (rank == 0) caller();
  rpc::shutdown();
}

void worker0() {
  rpc::TensorPipeRpcBackendOptions options;
  options.num_worker_threads = 8;
  // maps worker0's cuda:0 to worker1's cuda:1
  options.device_maps = {{"worker1", {{0, 1}}}};
  // maps worker0's cuda:1 to worker1's cuda:2
  options.set_device_map("worker1", {{1, 2}});

  rpc::init_rpc("worker0", {.backend = rpc::BackendType::TENSORPIPE,
                            .rank = 0,
                            .world_size = 2,
                            .rpc_backend_options = options});

  const auto x = torch::ones({2});
  const auto rets = rpc::rpc_sync("worker1", add, x.to(accelerator(0)), 1);
  // The first argument will be moved to cuda:1 on worker1. When sending the return value back, it
  // will follow the invert of the device map, and hence will be moved back to cuda:0 and cuda:1 on
  // worker0
  say(text_of(rets[0]));
  say(text_of(rets[1]));
  rpc::shutdown();
}

void worker1() {
  rpc::TensorPipeRpcBackendOptions options;
  options.num_worker_threads = 8;
  options.rpc_timeout = std::chrono::seconds(20);  // 20 second timeout
  rpc::init_rpc("worker1", {.rank = 1, .world_size = 2, .rpc_backend_options = options});
  rpc::shutdown();
}

/// One of two workers, of a launcher that sets RANK.
void device_maps(const Arguments&) {
  rpc::register_function("add", add);
  variable("RANK") == "0" ? worker0() : worker1();
}

}  // namespace

Programs calls() { return {{"calls", calls_to_a_worker}, {"device_maps", device_maps}}; }

}  // namespace documents
