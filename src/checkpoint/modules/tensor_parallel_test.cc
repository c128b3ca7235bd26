// SPDX-License-Identifier: BSD-3-Clause
// Models of tensor-parallel layers, saved by some ranks and loaded by others, and by torch's
// layers.

#include <torch/optim/adam.h>

#include <memory>
#include <optional>

#include "core/base/process/temporary_folder.h"
#include "muster/checkpoint.h"
#include "muster/device_mesh.h"
#include "muster/parallel.h"
#include "train/tensor/testing/nets.h"

namespace muster::checkpoint {
namespace {

using testing::divided_net;
using testing::DividedNet;
using testing::on_ranks;
using testing::some_ids;
using testing::whole_net;
using testing::WholeNet;

enum class Around { nothing, ddp, fsdp };

/// One dimension of the mesh divides the layers. With a second one their copies get equal data.
struct Job {
  int ranks, tensor_parallel;
  Around around;
};
constexpr Job kJobs[] = {{2, 2, Around::nothing}, {4, 4, Around::nothing}, {1, 1, Around::nothing},
                         {3, 3, Around::nothing}, {4, 2, Around::ddp},     {4, 2, Around::fsdp}};

template <class Net>
std::unique_ptr<torch::optim::Adam> adam(const Net& net) {
  return std::make_unique<torch::optim::Adam>(net->parameters(),
                                              torch::optim::AdamOptions(0.02).eps(1e-4));
}

template <class Net, class Forward>
void step(Net& net, torch::optim::Adam& optimizer, int number, const Forward& forward) {
  optimizer.zero_grad();
  net->loss(forward(some_ids(number)), some_ids(number + 1)).backward();
  optimizer.step();
}

State state_of(torch::nn::Module& net, torch::optim::Adam& optimizer) {
  State state;
  state.add_module("model", net).add_optimizer("optimizer", optimizer, net);
  return state;
}

/// A rank of a job.
struct Divided {
  DeviceMesh mesh;
  DividedNet net;
  std::optional<DistributedDataParallel<DividedNet>> ddp;
  std::optional<FullyShardedDataParallel<DividedNet>> fsdp;
  std::unique_ptr<torch::optim::Adam> optimizer;

  Divided(const Job& job, std::uint64_t seed)
      : mesh(init_device_mesh("cpu", {job.ranks / job.tensor_parallel, job.tensor_parallel},
                              {.mesh_dim_names = {"dp", "tp"}})),
        net(divided_net(seed, mesh.get_group("tp"), true)) {
    const Group copies = mesh.get_group("dp");
    if (job.around == Around::ddp)
      ddp.emplace(net, DistributedDataParallelOptions{.process_group = copies});
    if (job.around == Around::fsdp)
      fsdp.emplace(net, FullyShardedDataParallelOptions{.process_group = copies});
    optimizer = adam(net);
  }
  void train(int from, int to) {
    for (int number = from; number < to; ++number)
      step(net, *optimizer, number, [&](const at::Tensor& ids) {
        return ddp ? (*ddp)(ids) : fsdp ? (*fsdp)(ids) : net(ids);
      });
  }
};

void train_alone(WholeNet& net, torch::optim::Adam& optimizer, int from, int to) {
  for (int number = from; number < to; ++number)
    step(net, optimizer, number, [&](const at::Tensor& ids) { return net(ids); });
}

/// Loads what was saved after two steps and trains a third: the net of one process after three.
WholeNet continued_alone(const std::string& path) {
  auto net = whole_net(99);
  const auto optimizer = adam(net);
  auto state = state_of(*net, *optimizer);
  load(state, path);
  train_alone(net, *optimizer, 2, 3);
  return net;
}

void expect_equal(const torch::nn::Module& found, const torch::nn::Module& expected,
                  const std::string& what) {
  const auto all = expected.named_parameters();
  for (const auto& named : found.named_parameters())
    testing::expect_close(named.value().detach(), all[named.key()].detach(),
                          what + ", " + named.key());
}

// spec: T1 S1 tensor-parallel parameters with their optimizer, S2 what any number of ranks saved
// loads on any other, with DDP or FSDP around them, and into torch's layers of one process
TEST(CheckpointTensorParallel, AnyNumberOfRanksReadsAnyOther) {
  const TemporaryFolder folder("muster-checkpoint-");
  auto alone = whole_net(7);
  const auto optimizer = adam(alone);
  train_alone(alone, *optimizer, 0, 2);
  save(state_of(*alone, *optimizer), folder.path() + "/whole");
  train_alone(alone, *optimizer, 2, 3);

  for (const Job& from : kJobs) {
    const std::string written = folder.path() + "/written", again = folder.path() + "/again";
    const std::string what =
        std::to_string(from.ranks) + " ranks, by " + std::to_string(from.tensor_parallel);
    on_ranks(from.ranks, [&](int) {
      Divided job(from, 7);
      job.train(0, 2);
      save(state_of(*job.net, *job.optimizer), written);
    });
    expect_equal(*continued_alone(written), *alone, "from " + what);
    on_ranks(from.ranks, [&](int) {
      Divided job(from, 99);
      auto state = state_of(*job.net, *job.optimizer);
      load(state, folder.path() + "/whole");
      save(state, again);
      job.train(2, 3);
    });
    expect_equal(*continued_alone(again), *alone, "to " + what);
  }
}

// spec: T1 S2 saved by two ranks, loaded by one, three and four: each has its part of the whole
TEST(CheckpointTensorParallel, TwoToOthers) {
  const TemporaryFolder folder("muster-checkpoint-");
  const auto alone = whole_net(7);
  on_ranks(2, [&](int) {
    Divided job({2, 2, Around::nothing}, 7);
    save(state_of(*job.net, *job.optimizer), folder.path() + "/two");
  });
  for (const int ranks : {1, 3, 4})
    on_ranks(ranks, [&](int) {
      Divided job({ranks, ranks, Around::nothing}, 99);
      auto state = state_of(*job.net, *job.optimizer);
      load(state, folder.path() + "/two");
      testing::expect_parts(*job.net, *alone);
    });
}

}  // namespace
}  // namespace muster::checkpoint
