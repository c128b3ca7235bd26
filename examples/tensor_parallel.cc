// SPDX-License-Identifier: BSD-3-Clause
// A language model whose layers are divided over two ranks, with sequence parallelism, and copies
// of it for the data. It learns to count: after id n comes (3 n + 1) mod 50.
//
//   muster run --standalone --nproc-per-node 4 build/release/bin/tensor_parallel

#include <muster/device_mesh.h>
#include <muster/distributed.h>
#include <muster/parallel.h>
#include <muster/tensor_parallel.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <cstdint>
#include <iostream>
#include <vector>

namespace {

constexpr std::int64_t kVocab = 50, kWidth = 32, kLength = 8, kBatch = 16;
constexpr int kSteps = 150;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const muster::Group& tp)
      : embedding(register_module("embedding", muster::VocabParallelEmbedding(
                                                   kVocab, kWidth,
                                                   muster::VocabParallelEmbeddingOptions{
                                                       .sequence_parallel = true, .group = tp}))),
        norm(register_module("norm", muster::SequenceParallelLayerNorm(
                                         std::vector<std::int64_t>{kWidth},
                                         muster::SequenceParallelLayerNormOptions{.group = tp}))),
        up(register_module(
            "up", muster::ColumnParallelLinear(kWidth, 4 * kWidth,
                                               muster::ColumnParallelLinearOptions{
                                                   .sequence_parallel = true, .group = tp}))),
        down(register_module(
            "down", muster::RowParallelLinear(
                        4 * kWidth, kWidth,
                        muster::RowParallelLinearOptions{.sequence_parallel = true, .group = tp}))),
        head(register_module(
            "head", muster::ColumnParallelLinear(kWidth, kVocab,
                                                 muster::ColumnParallelLinearOptions{
                                                     .sequence_parallel = true, .group = tp}))) {}
  /// ids: [length, batch], equal on the ranks of the group. Returns this rank's part of the logits.
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = embedding(ids);
    return head(x + down(at::gelu(up(norm(x)))));
  }
  muster::VocabParallelEmbedding embedding;
  muster::SequenceParallelLayerNorm norm;
  muster::ColumnParallelLinear up;
  muster::RowParallelLinear down;
  muster::ColumnParallelLinear head;
};
TORCH_MODULE(Model);

}  // namespace

int main() {
  muster::init_process_group();
  const int ranks = muster::get_world_size(), divided = ranks % 2 == 0 ? 2 : 1;
  const auto mesh =
      muster::init_device_mesh("cpu", {ranks / divided, divided}, {.mesh_dim_names = {"dp", "tp"}});
  const auto tp = mesh.get_group("tp");

  torch::manual_seed(1);  // equal on all ranks: each draws whole weights and keeps its part
  Model net(tp);
  muster::DistributedDataParallel<Model> model(net, {.process_group = mesh.get_group("dp")});
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));

  torch::manual_seed(2 + static_cast<std::uint64_t>(mesh.get_local_rank("dp")));  // the data
  double last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto ids = torch::randint(kVocab, {kLength, kBatch}, at::kLong);
    const auto next = (ids * 3 + 1).remainder(kVocab);
    optimizer.zero_grad();
    const auto loss = muster::parallel_cross_entropy(model(ids), next, kVocab, {.group = tp});
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
  }
  const bool learned = last < 0.1;
  if (muster::get_rank() == 0)
    std::cout << "loss after " << kSteps << " steps on " << ranks << " ranks: " << last
              << (learned ? "" : ", which is too much") << '\n';
  muster::destroy_process_group();
  return learned ? 0 : 1;
}
