// SPDX-License-Identifier: BSD-3-Clause
// DistributedDataParallel of modules on accelerators. Rank r has the devices 2r and 2r + 1, since
// autograd has one thread for each device of a process, and ranks are threads here.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/deferred_device.h"
#ifdef NCCL_STANDIN
#include "nccl_ranks.h"
#endif

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

#ifdef NCCL_STANDIN  // the program that has nccl too
void on_devices(int ranks, const std::function<void(int)>& body) { on_nccl_ranks(ranks, body); }
#else
void on_devices(int ranks, const std::function<void(int)>& body) {
  deferred::install();
  on_ranks(ranks, body, "cpu:native,deferred:native");
}
#endif

at::Device device(int index) {
  return at::Device(deferred::kType, static_cast<c10::DeviceIndex>(index));
}

/// Two layers, each with a buffer of what it has seen, on one device or on two; and a way out that
/// need not be taken.
struct SpreadImpl : nn::Module {
  SpreadImpl(at::Device here, at::Device there, double salt = 0) {
    const auto numbers = [&](at::IntArrayRef sizes) {
      return torch::sin((torch::arange(c10::multiply_integers(sizes), at::kDouble) + (salt += 17)) *
                        12.9898)
          .view(sizes);
    };
    first = register_parameter("first", numbers({3, 5}).to(here));
    shift = register_parameter("shift", numbers({5}).to(here));
    second = register_parameter("second", numbers({5, 2}).to(there));
    other = register_parameter("other", numbers({5, 2}).to(there));
    seen_first = register_buffer("seen_first", numbers({3}).to(here));
    seen_second = register_buffer("seen_second", numbers({5}).to(there));
  }
  at::Tensor forward(const at::Tensor& x, bool both = true) {
    const auto inner = torch::tanh(x.matmul(first) + shift).to(second.device());
    seen_first.add_(x.detach().mean(0));
    seen_second.add_(inner.detach().mean(0));
    return both ? inner.matmul(second) + inner.matmul(other) : inner.matmul(second);
  }
  at::Tensor first, shift, second, other, seen_first, seen_second;
};
TORCH_MODULE(Spread);

at::Tensor batch(int rank, int step) {
  return torch::sin(torch::arange(12, at::kDouble) * 0.7 + rank * 3 + step * 5).view({4, 3});
}

/// Trains for a few steps, one of them adding up locally first.
template <class Model>
void train(Model& model, const std::vector<at::Tensor>& parameters, at::Device inputs, int rank,
           bool both) {
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    if (step == 2) {
      const auto local = model.no_sync();
      model(batch(rank, 7).to(inputs), both).square().sum().backward();
    }
    model(batch(rank, step).to(inputs), both).square().sum().backward();
    optimizer.step();
  }
}

void expect_same_state(const Spread& theirs, const Spread& ours, const char* what) {
  const auto compare = [&](const auto& a, const auto& b) {
    for (const auto& item : a) {
      const auto mine = b[item.key()].cpu(), other = item.value().cpu();
      EXPECT_LT((mine - other).abs().max().template item<double>(), 1e-12)
          << what << ": " << item.key() << "\n"
          << mine << "\nand\n"
          << other;
    }
  };
  compare(theirs->named_parameters(), ours->named_parameters());
  compare(theirs->named_buffers(), ours->named_buffers());
}

const std::vector<std::pair<const char*, Options>> kOptions{
    {"defaults", {}},
    {"small buckets", {.bucket_cap_mb = 0.00001}},
    {"unused parameters", {.find_unused_parameters = true}},
    {"views", {.gradient_as_bucket_view = true}},
    {"views of small buckets", {.bucket_cap_mb = 0.00001, .gradient_as_bucket_view = true}},
    {"a static graph", {.static_graph = true}},
};

/// The parameters of the same ranks after training on the CPU.
Spread trained_on_cpu(int rank, const Options& options, bool both) {
  Spread net(at::kCPU, at::kCPU, rank);
  DistributedDataParallel<Spread> model(net, options);
  train(model, net->parameters(), at::kCPU, rank, both);
  return net;
}

// spec: K4.devices a model spread over several devices trains to the weights of one on the CPU
TEST(DdpDevices, AModelOnTwoDevicesTrainsAsOnOne) {
  for (const auto& [what, options] : kOptions) {
    on_devices(3, [&, what = what, &options = options](int rank) {
      const bool both = !options.find_unused_parameters;
      Spread net(device(2 * rank), device(2 * rank + 1), rank);
      DistributedDataParallel<Spread> model(net, options);
      EXPECT_FALSE(model.output_device());
      train(model, net->parameters(), device(2 * rank), rank, both);
      EXPECT_EQ(net->first.device(), device(2 * rank));
      EXPECT_EQ(net->second.grad().device(), device(2 * rank + 1));
      expect_same_state(trained_on_cpu(rank, options, both), net, what);
    });
  }
}

// spec: K4 communication hooks of a model on several devices
TEST(DdpDevices, HooksSeeBucketsOfOneDeviceEach) {
  on_devices(2, [](int rank) {
    Spread net(device(2 * rank), device(2 * rank + 1), rank), same(at::kCPU, at::kCPU, rank);
    DistributedDataParallel<Spread> model(net), reference(same);
    model.register_comm_hook([rank, plain = all_reduce_hook()](const GradBucket& bucket) {
      for (const auto& parameter : bucket.parameters)
        EXPECT_EQ(parameter.device(), bucket.buffer.device()) << "on rank " << rank;
      return plain(bucket);
    });
    train(model, net->parameters(), device(2 * rank), rank, true);
    train(reference, same->parameters(), at::kCPU, rank, true);
    expect_same_state(same, net, "with a hook");
  });
}

// Ranks whose parameters are divided otherwise would wait for calls that the others never make.
TEST(DdpDevices, ModulesDividedOtherwiseAreRefused) {
  on_devices(2, [](int rank) {
    Spread net(device(2 * rank), device(rank == 0 ? 0 : 3));
    const auto text =
        message_of<DistError>([&] { const DistributedDataParallel<Spread> model(net); });
    EXPECT_HAS(text,
               "'second [5, 2] Double trained' on rank 0 and 'second [5, 2] Double on device 2 "
               "trained' on rank 1");
  });
}

// spec: K9 with device_ids, forward moves inputs to the device; output_device defaults to
// device_ids[0]
TEST(DdpDevices, DeviceIdsMoveInputs) {
  on_devices(2, [](int rank) {
    const int id = 2 * rank + 1;
    Spread net(device(id), device(id), rank);
    DistributedDataParallel<Spread> model(net, {.device_ids = std::vector<int>{id}});
    EXPECT_EQ(model.output_device(), id);
    EXPECT_EQ(model(batch(rank, 0)).device(), device(id));
    EXPECT_EQ(model(deferred::on_device(batch(rank, 0), 2 * rank)).device(), device(id))
        << "from another device";
    model(batch(rank, 0)).sum().backward();
    train(model, net->parameters(), at::kCPU, rank, true);
    Spread same(at::kCPU, at::kCPU, rank);
    DistributedDataParallel<Spread> reference(same);
    for (int pass = 0; pass < 2; ++pass) reference(batch(rank, 0));
    reference(batch(rank, 0)).sum().backward();
    train(reference, same->parameters(), at::kCPU, rank, true);
    expect_same_state(same, net, "with device_ids");
  });
}

/// Its arguments come as they are, or moved, wherever they stand.
struct PlacesImpl : nn::Module {
  explicit PlacesImpl(at::Device device)
      : weight(register_parameter("weight", torch::ones({2}).to(device))) {}
  at::Tensor forward(const at::Tensor& x, const std::vector<at::Tensor>& list,
                     const std::tuple<at::Tensor, int>& pair) {
    seen = {x.device(), list.at(0).device(), std::get<0>(pair).device()};
    return weight * 2;
  }
  at::Tensor weight;
  std::vector<at::Device> seen;
};

// spec: K9 device_ids reach into structures of arguments; without them nothing is moved;
// output_device may be another
TEST(DdpDevices, WithoutDeviceIdsNothingIsMoved) {
  on_devices(1, [](int) {
    const auto x = torch::ones({2}), elsewhere = deferred::on_device(x, 5);
    const auto seen = [&](const Options& options) {
      const auto places = std::make_shared<PlacesImpl>(device(1));
      DistributedDataParallel<std::shared_ptr<PlacesImpl>> model(places, options);
      EXPECT_EQ(model.output_device(), options.output_device ? options.output_device
                                       : options.device_ids  ? std::optional<int>(1)
                                                             : std::nullopt);
      model(x, std::vector{elsewhere}, std::tuple(x, 3));
      return places->seen;
    };
    EXPECT_EQ(seen({}), (std::vector<at::Device>{at::kCPU, device(5), at::kCPU}));
    EXPECT_EQ(seen({.device_ids = std::vector<int>{1}}), std::vector<at::Device>(3, device(1)));
    EXPECT_EQ(seen({.device_ids = std::vector<int>{1}, .output_device = 4}),
              std::vector<at::Device>(3, device(1)));
  });
}

// spec: K9 more than one id is an error; device_ids is None for models on several devices
TEST(DdpDevices, DeviceIdsThatCannotBeAreRefused) {
  on_devices(1, [](int) {
    const auto said = [](int here, int there, const std::vector<int>& ids) {
      return message_of<DistError>([&] {
        const DistributedDataParallel<Spread> model(Spread(device(here), device(there)),
                                                    {.device_ids = ids});
      });
    };
    EXPECT_HAS(said(0, 0, {0, 1}), "device_ids has 2 entries");
    EXPECT_HAS(said(0, 1, {0}),
               "device_ids is for modules on one device of an accelerator, and this one is on "
               "deferred:0 and deferred:1");
    EXPECT_HAS(said(2, 2, {1}), "device_ids is {1}, and the module is on deferred:2");
  });
}

/// With a clone() of its own: Cloneable's sets data of another type, which torch refuses for
/// devices of vendors.
struct DoubledImpl : nn::Module {
  explicit DoubledImpl(at::Device device)
      : weight(register_parameter("weight", torch::full({3}, 2.0, at::kDouble).to(device))) {}
  std::shared_ptr<nn::Module> clone(const std::optional<at::Device>& device = {}) const override {
    return std::make_shared<DoubledImpl>(device.value_or(weight.device()));
  }
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_EQ(x.device(), weight.device());
    return x * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(Doubled);

// spec: K6 replicas on several devices: the batch is split, outputs come to the first one or to
// output_device, gradients are summed
// spec: K10 the input may be on any device
TEST(DdpDevices, ReplicasOnSeveralDevices) {
  deferred::install();
  Doubled net(device(0));
  for (const auto& [output, expected] :
       {std::pair(std::optional<int>(), 0), std::pair(std::optional<int>(2), 2)}) {
    DataParallel<Doubled> model(net,
                                {.device_ids = std::vector<int>{0, 1, 2}, .output_device = output});
    for (const auto from : {at::Device(at::kCPU), device(1), device(5)}) {
      net->zero_grad();
      const auto out = model(batch(0, 0).to(from));
      EXPECT_EQ(out.device(), device(expected));
      EXPECT_LT((out.cpu() - batch(0, 0) * 2).abs().max().item<double>(), 1e-12);
      out.sum().backward();
      EXPECT_EQ(net->weight.grad().device(), device(0));
      EXPECT_LT((net->weight.grad().cpu() - batch(0, 0).sum(0)).abs().max().item<double>(), 1e-12);
    }
  }
}

}  // namespace
}  // namespace muster::testing
