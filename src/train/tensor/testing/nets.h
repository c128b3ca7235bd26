// SPDX-License-Identifier: BSD-3-Clause
/// A small language model, divided and whole, for the tests of tensor parallelism.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "core/group/testing/ranks.h"
#include "muster/tensor_parallel.h"

namespace muster::testing {

constexpr std::int64_t kVocab = 11, kWidth = 6, kHidden = 10, kLength = 12, kBatch = 4;

inline std::mutex one_constructs;
/// Threads as ranks share torch's generator: one at a time constructs after the seed.
template <class Make>
auto seeded(std::uint64_t seed, Make make) {
  const std::lock_guard lock(one_constructs);
  torch::manual_seed(seed);
  return make();
}

/// Part `rank` of `ranks` of a dimension, as the layers divide it.
inline at::Tensor part_of(const at::Tensor& whole, std::int64_t dim, int ranks, int rank) {
  const std::int64_t size = whole.size(dim), each = (size + ranks - 1) / ranks;
  const std::int64_t first = std::min(size, each * rank);
  return whole.detach().narrow(dim, first, std::min(each, size - first));
}

/// The part of the whole parameter that a layer's parameter holds.
inline at::Tensor like_part(const at::Tensor& whole, const at::Tensor& parameter) {
  at::Tensor found = whole.detach();
  if (const auto part = tensor_parallel_part(parameter))
    for (std::int64_t d = 0; d < whole.dim(); ++d)
      found = found.narrow(d, part->offsets[static_cast<std::size_t>(d)], parameter.size(d));
  return found;
}

/// Equal but for the order of sums.
inline void expect_close(const at::Tensor& found, const at::Tensor& expected,
                         const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::allclose(found, expected, 0, 1e-12)) << what << "\n"
                                                          << found << "\nand\n"
                                                          << expected;
}

/// Numbers without a pattern, the same on every rank.
inline at::Tensor numbers(at::IntArrayRef sizes, double salt = 1) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes), at::kDouble) * 12.9898 + salt)
      .view(sizes);
}
inline at::Tensor some_ids(int salt = 0) {
  return (torch::arange(kLength * kBatch, at::kLong) * 7 + salt * 3 + 1)
      .remainder(kVocab)
      .view({kLength, kBatch});
}

struct WholeNetImpl : torch::nn::Module {
  WholeNetImpl()
      : embedding(register_module(
            "embedding",
            torch::nn::Embedding(torch::nn::EmbeddingOptions(kVocab, kWidth).padding_idx(3)))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, kHidden))),
        down(register_module("down", torch::nn::Linear(kHidden, kWidth))),
        head(register_module("head", torch::nn::Linear(kWidth, kVocab))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = embedding(ids);
    return head(x + down(at::gelu(up(norm(x)))));
  }
  static at::Tensor loss(const at::Tensor& logits, const at::Tensor& target) {
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), target.flatten());
  }
  torch::nn::Embedding embedding;
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down, head;
};
TORCH_MODULE(WholeNet);

/// The same, divided; its norm works on parts of the sequence with sequence_parallel.
struct DividedNetImpl : torch::nn::Module {
  DividedNetImpl(const Group& of, bool sequence_parallel)
      : group(of),
        embedding(register_module(
            "embedding",
            VocabParallelEmbedding(
                kVocab, kWidth,
                VocabParallelEmbeddingOptions{
                    .padding_idx = 3, .sequence_parallel = sequence_parallel, .group = of}))) {
    if (sequence_parallel)
      parallel_norm = register_module(
          "norm", SequenceParallelLayerNorm(std::vector<std::int64_t>{kWidth},
                                            SequenceParallelLayerNormOptions{.group = of}));
    else
      norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    const ColumnParallelLinearOptions columns{.sequence_parallel = sequence_parallel, .group = of};
    up = register_module("up", ColumnParallelLinear(kWidth, kHidden, columns));
    down = register_module(
        "down", RowParallelLinear(
                    kHidden, kWidth,
                    RowParallelLinearOptions{.sequence_parallel = sequence_parallel, .group = of}));
    head = register_module("head", ColumnParallelLinear(kWidth, kVocab, columns));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = embedding(ids);
    return head(x + down(at::gelu(up(norm ? norm(x) : parallel_norm(x)))));
  }
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& target) const {
    return parallel_cross_entropy(logits, target, kVocab, {.group = group});
  }
  Group group;
  VocabParallelEmbedding embedding;
  torch::nn::LayerNorm norm = nullptr;
  SequenceParallelLayerNorm parallel_norm = nullptr;
  ColumnParallelLinear up = nullptr, head = nullptr;
  RowParallelLinear down = nullptr;
};
TORCH_MODULE(DividedNet);

inline WholeNet whole_net(std::uint64_t seed) {
  return seeded(seed, [] { return WholeNet(); });
}
inline DividedNet divided_net(std::uint64_t seed, const Group& group, bool sequence_parallel) {
  return seeded(seed, [&] { return DividedNet(group, sequence_parallel); });
}

/// Each parameter against its part of the whole net's.
inline void expect_parts(const torch::nn::Module& divided, const torch::nn::Module& whole) {
  const auto expected = whole.named_parameters();
  ASSERT_EQ(divided.named_parameters().size(), expected.size());
  for (const auto& named : divided.named_parameters())
    expect_close(named.value().detach(), like_part(expected[named.key()], named.value()),
                 named.key());
}

}  // namespace muster::testing
