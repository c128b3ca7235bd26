// SPDX-License-Identifier: BSD-3-Clause
// FSDP and the checkpoint pattern on backend nccl; DDP is in ddp_devices_test.cc.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"
#include "core/trace/reader.h"
#include "muster/parallel.h"
#include "nccl_ranks.h"
#include "testing/deferred_device.h"
#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing {
namespace {

struct LayersImpl : torch::nn::Module {
  LayersImpl(int salt, at::Device device) {
    const auto numbers = [&](at::IntArrayRef sizes) {
      return torch::sin((torch::arange(c10::multiply_integers(sizes), at::kDouble) + (salt += 17)) *
                        12.9898)
          .view(sizes)
          .to(device);
    };
    first = register_parameter("first", numbers({5, 7}));
    shift = register_parameter("shift", numbers({7}));
    second = register_parameter("second", numbers({7, 3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(x.matmul(first) + shift).matmul(second);
  }
  at::Tensor first, shift, second;
};
TORCH_MODULE(Layers);

/// Three steps of a sharded module, and its parameters then.
at::Tensor trained(int rank, int ranks, at::Device device) {
  Layers net(rank, device);  // rank 0's values are used
  FullyShardedDataParallel<Layers> model(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    fsdp::loss_of(model(fsdp::share(fsdp::inputs(), rank, ranks).to(device)),
                  fsdp::share(fsdp::targets(), rank, ranks).to(device))
        .backward();
    optimizer.step();
  }
  return fsdp::whole(model).cpu();
}

// spec: M1 M3 a module on an accelerator is sharded and trains as on the CPU
TEST(NcclTraining, AShardedModuleTrainsAsOnTheCpu) {
  on_nccl_ranks(3, [](int rank) {
    EXPECT_LT(fsdp::difference(trained(rank, 3, device_of(rank)), trained(rank, 3, at::kCPU)),
              1e-9);
  });
}

/// Has the gradients of a backward pass reduced by asynchronous calls of that name on the device's
/// backend. A synchronous call would be one that is made after backward, as where the thread that
/// computes must drive the CPU's backend.
void expect_overlap(const std::string& name, const std::function<at::Tensor()>& loss) {
  const auto count = [&](bool async) -> std::ptrdiff_t {
    const auto trace = trace::read_trace(core_of(default_group()).parts().recorder->path());
    if (!trace.ok()) return -1;
    return std::ranges::count_if(trace->records, [&](const trace::Record& call) {
      return call.name == name && call.async == async &&
             trace->groups[call.group].name.find("on deferred") != std::string::npos;
    });
  };
  const auto beside = count(true), after = count(false);
  loss().backward();
  EXPECT_GT(count(true), beside);
  EXPECT_EQ(count(false), after);
}

// spec: K2 gradients on an accelerator are averaged during backward, overlapped with it: by its own
// backend, whether or not the CPU's backend needs a core of its own
TEST(NcclTraining, GradientsAreReducedBesideBackward) {
  on_nccl_ranks(3, [](int rank) {
    const auto device = device_of(rank);
    Layers net(rank, device);
    DistributedDataParallel<Layers> model(net, {.bucket_cap_mb = 0.00001});
    expect_overlap("all_reduce", [&] {
      return fsdp::loss_of(model(fsdp::inputs().to(device)), fsdp::targets().to(device));
    });
  });
}

// spec: M3 so are those of a sharded module
TEST(NcclTraining, ShardedGradientsAreReducedBesideBackward) {
  on_nccl_ranks(3, [](int rank) {
    const auto device = device_of(rank);
    Layers net(rank, device);
    FullyShardedDataParallel<Layers> model(net);
    expect_overlap("reduce_scatter_tensor", [&] {
      return fsdp::loss_of(model(fsdp::inputs().to(device)), fsdp::targets().to(device));
    });
  });
}

// spec: A1 K2 M1 a group that has nccl alone, which takes no tensors of the CPU, averages
// gradients: what DistributedDataParallel and FSDP exchange besides goes over the accelerator, too
TEST(NcclTraining, AGroupOfNcclAloneTrains) {
  using Options = DistributedDataParallelOptions;
  const std::vector<Options> variants{
      {.bucket_cap_mb = 0.00001}, {.find_unused_parameters = true}, {.static_graph = true}};
  on_nccl_ranks(
      2,
      [&](int rank) {
        const auto device = device_of(rank);
        for (const auto& options : variants) {
          Layers net(rank, device);
          DistributedDataParallel<Layers> model(net, options);
          torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
          auto join = model.join();
          join.run([&] {
            for (int step = 0; step < 2 + rank; ++step) {
              optimizer.zero_grad();
              fsdp::loss_of(model(fsdp::inputs().to(device)), fsdp::targets().to(device))
                  .backward();
              optimizer.step();
            }
          });
          const auto mine = flat(net->parameters());
          auto first = mine.clone();
          broadcast(first, {.src = 0});
          EXPECT_SAME(first.cpu(), mine.cpu());
          EXPECT_FALSE(torch::equal(mine.cpu(), flat(Layers(0, device)->parameters()).cpu()));
        }
        const auto sharded = trained(rank, 2, device);
        auto first = sharded.to(device);
        broadcast(first, {.src = 0});
        EXPECT_SAME(first.cpu(), sharded);
      },
      "deferred:nccl");
}

// spec: K5 rank 0 saves, barrier, the others load with a device map
TEST(NcclTraining, TheCheckpointPatternLoadsOntoTheOwnDevice) {
  on_nccl_ranks(2, [](int rank) {
    const auto device = device_of(rank);
    const auto weight = values(rank, {3, 2}).to(device);
    std::vector<std::string> bytes(1);
    if (rank == 0) {
      std::ostringstream file;
      torch::save(weight.cpu(), file);
      bytes[0] = file.str();
    }
    broadcast_object_list(bytes, {.src = 0});
    barrier();
    at::Tensor loaded;
    std::istringstream file(bytes[0]);
    torch::load(loaded, file, device);
    EXPECT_EQ(loaded.device(), device);
    EXPECT_SAME(loaded.cpu(), values(0, {3, 2}));
  });
}

}  // namespace
}  // namespace muster::testing
