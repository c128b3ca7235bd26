// SPDX-License-Identifier: BSD-3-Clause
// A model trained on several ranks, against the same model on one.

#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <string>
#include <vector>

#include "muster/device_mesh.h"
#include "muster/parallel.h"
#include "train/tensor/testing/nets.h"

namespace muster {
namespace {

using testing::divided_net;
using testing::DividedNet;
using testing::expect_parts;
using testing::on_ranks;
using testing::some_ids;
using testing::whole_net;
using testing::WholeNet;

constexpr int kSteps = 5;

template <class Net, class Forward>
void train(Net& net, const Forward& forward, int part = 0, int parts = 1) {
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.02).eps(1e-4));
  for (int step = 0; step < kSteps; ++step) {
    const auto mine = [&](const at::Tensor& all) {
      return all.chunk(parts, 1)[static_cast<std::size_t>(part)];
    };
    optimizer.zero_grad();
    net->loss(forward(mine(some_ids(step))), mine(some_ids(step + 1))).backward();
    optimizer.step();
  }
}

WholeNet trained_alone() {
  auto net = whole_net(7);
  train(net, [&](const at::Tensor& ids) { return net(ids); });
  return net;
}

// spec: T1 embedding, MLP block and cross entropy train as in one process, from the same seed
// spec: T1 sequence parallelism trains as one process does
TEST(TensorParallelTraining, EqualsOneProcess) {
  const auto alone = trained_alone();
  for (const int ranks : {1, 2, 3, 4})
    for (const bool sequence_parallel : {false, true})
      on_ranks(ranks, [&](int) {
        auto net = divided_net(7, default_group(), sequence_parallel);
        expect_parts(*net, *whole_net(7));
        train(net, [&](const at::Tensor& ids) { return net(ids); });
        expect_parts(*net, *alone);
      });
}

// spec: T1 DDP over one dimension of a mesh around layers of the other
TEST(TensorParallelTraining, UnderDdpOnAMesh) {
  const auto alone = trained_alone();
  for (const bool sequence_parallel : {false, true})
    on_ranks(4, [&](int) {
      const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
      auto net = divided_net(7, mesh.get_group("tp"), sequence_parallel);
      DistributedDataParallel<DividedNet> model(net, {.process_group = mesh.get_group("dp")});
      train(
          net, [&](const at::Tensor& ids) { return model(ids); }, mesh.get_local_rank("dp"), 2);
      expect_parts(*net, *alone);
    });
}

/// Steps of a model that is clipped, and the norms before.
template <class Net, class Forward, class Clip>
std::vector<double> norms_of(Net& net, const Forward& forward, const Clip& clip, int part = 0,
                             int parts = 1) {
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.02).eps(1e-4));
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    const auto mine = [&](const at::Tensor& all) {
      return all.chunk(parts, 1)[static_cast<std::size_t>(part)];
    };
    optimizer.zero_grad();
    net->loss(forward(mine(some_ids(step))), mine(some_ids(step + 1))).backward();
    norms.push_back(clip());
    optimizer.step();
  }
  return norms;
}

// spec: T1 M3 clipping under FSDP counts all parts of a divided layer's gradients, and those that
// the layers' ranks share once
TEST(TensorParallelTraining, ClippedUnderFsdpOnAMesh) {
  constexpr double kMost = 0.1;
  auto alone = whole_net(7);
  const std::vector<double> expected = norms_of(
      alone, [&](const at::Tensor& ids) { return alone(ids); },
      [&] { return torch::nn::utils::clip_grad_norm_(alone->parameters(), kMost); });
  for (const bool sequence_parallel : {false, true})
    on_ranks(4, [&](int) {
      const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
      auto net = divided_net(7, mesh.get_group("tp"), sequence_parallel);
      FullyShardedDataParallel<DividedNet> model(net, {.process_group = mesh.get_group("dp")});
      const std::vector<double> norms = norms_of(
          net, [&](const at::Tensor& ids) { return model(ids); },
          [&] { return model.clip_grad_norm_(kMost); }, mesh.get_local_rank("dp"), 2);
      for (std::size_t step = 0; step < norms.size(); ++step)
        EXPECT_NEAR(norms[step], expected[step], 1e-9) << "step " << step;
    });
}

// spec: T1.refusal M3.refusal a part whose group nobody has told is not clipped as if it were whole
TEST(TensorParallelTraining, PartsOfUnknownGroupsAreNotClipped) {
  on_ranks(2, [&](int rank) {
    torch::nn::Linear net(4, 2);
    set_tensor_parallel_part(net->weight, {.sizes = {4, 4}, .offsets = {2 * rank, 0}});
    FullyShardedDataParallel<torch::nn::Linear> model(net, {});
    try {
      model.clip_grad_norm_(1);
      ADD_FAILURE() << "a norm of some of the parts";
    } catch (const DistError& error) {
      EXPECT_NE(std::string(error.what()).find("'weight'"), std::string::npos) << error.what();
    }
  });
}

// spec: M3 T1 a frozen part adds nothing to the norm, with or without a group; groups of the same
// ranks are one
TEST(TensorParallelTraining, FrozenPartsAndEqualGroupsAreClipped) {
  on_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", {1, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const Group same = mesh.get_group("tp"), again = new_group({.ranks = {0, 1}});
    for (const bool is_frozen : {true, false}) {
      torch::nn::Linear net(4, 2);
      net->weight.requires_grad_(!is_frozen);
      set_tensor_parallel_part(
          net->weight,
          {.sizes = {4, 4}, .offsets = {2 * rank, 0}, .group = is_frozen ? nullptr : again});
      set_tensor_parallel_part(net->bias, {.sizes = {4}, .offsets = {2 * rank}, .group = same});
      FullyShardedDataParallel<torch::nn::Linear> model(net,
                                                        {.process_group = mesh.get_group("dp")});
      model(torch::ones({1, 4})).sum().backward();
      // Each rank has two rows, whose gradients are ones.
      EXPECT_NEAR(model.clip_grad_norm_(1), std::sqrt(is_frozen ? 4. : 20.), 1e-6);
    }
  });
}

// spec: T1.refusal M3.refusal units do not take parts of one tensor for copies of it
TEST(TensorParallelTraining, PartsAmongTheUnitsRanksAreRefused) {
  on_ranks(2, [&](int) {
    ColumnParallelLinear net(4, 4);
    try {
      FullyShardedDataParallel<ColumnParallelLinear> model(net, {});
      ADD_FAILURE() << "parts were averaged";
    } catch (const DistError& error) {
      EXPECT_NE(std::string(error.what()).find("copies of one tensor"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace muster
