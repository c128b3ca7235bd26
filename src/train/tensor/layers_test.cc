// SPDX-License-Identifier: BSD-3-Clause
// Each layer against the one of a single process.

#include <sstream>

#include "train/tensor/testing/nets.h"

namespace muster {
namespace {

using at::Tensor;
using testing::expect_close;
using testing::like_part;
using testing::message_of;
using testing::numbers;
using testing::on_ranks;
using testing::part_of;
using testing::seeded;

constexpr std::int64_t kIn = 6, kOut = 7, kRows = 12;

/// Outputs and gradients of one process.
struct Whole {
  torch::nn::Linear layer = nullptr;
  Tensor x, output, slope;

  explicit Whole(bool bias) {
    layer = seeded(
        5, [&] { return torch::nn::Linear(torch::nn::LinearOptions(kIn, kOut).bias(bias)); });
    layer->to(at::kDouble);
    x = numbers({kRows, 2, kIn}).requires_grad_();
    slope = numbers({kRows, 2, kOut}, 3);
    output = layer(x);
    (output * slope).sum().backward();
  }
};

template <class Layer>
void expect_like(const Layer& layer, const torch::nn::Linear& whole) {
  EXPECT_SAME(layer->weight.detach(), like_part(whole->weight, layer->weight));
  expect_close(layer->weight.grad(), like_part(whole->weight.grad(), layer->weight), "weight");
  ASSERT_EQ(layer->bias.defined(), whole->bias.defined());
  if (whole->bias.defined())
    expect_close(layer->bias.grad(), like_part(whole->bias.grad(), layer->bias), "bias");
}

void column_case(int ranks, int rank, bool gather_output, bool sequence_parallel, bool bias) {
  const Whole whole(bias);
  ColumnParallelLinear layer = seeded(5, [&] {
    return ColumnParallelLinear(kIn, kOut,
                                ColumnParallelLinearOptions{.bias = bias,
                                                            .gather_output = gather_output,
                                                            .sequence_parallel = sequence_parallel,
                                                            .dtype = at::kDouble});
  });
  const auto of_input = [&](const Tensor& tensor) {
    return sequence_parallel ? part_of(tensor, 0, ranks, rank) : tensor.detach();
  };
  const auto of_output = [&](const Tensor& tensor) {
    return gather_output ? tensor.detach() : part_of(tensor, -1, ranks, rank);
  };
  const auto x = of_input(whole.x).clone().requires_grad_();
  const auto output = layer(x);
  expect_close(output.detach(), of_output(whole.output), "output");
  (output * of_output(whole.slope)).sum().backward();
  expect_close(x.grad(), of_input(whole.x.grad()), "input");
  expect_like(layer, whole.layer);
}

void row_case(int ranks, int rank, bool input_is_parallel, bool sequence_parallel, bool bias) {
  const Whole whole(bias);
  RowParallelLinear layer = seeded(5, [&] {
    return RowParallelLinear(kIn, kOut,
                             RowParallelLinearOptions{.bias = bias,
                                                      .input_is_parallel = input_is_parallel,
                                                      .sequence_parallel = sequence_parallel,
                                                      .dtype = at::kDouble});
  });
  const auto of_input = [&](const Tensor& tensor) {
    return input_is_parallel ? part_of(tensor, -1, ranks, rank) : tensor.detach();
  };
  const auto of_output = [&](const Tensor& tensor) {
    return sequence_parallel ? part_of(tensor, 0, ranks, rank) : tensor.detach();
  };
  const auto x = of_input(whole.x).clone().requires_grad_();
  const auto output = layer(x);
  expect_close(output.detach(), of_output(whole.output), "output");
  (output * of_output(whole.slope)).sum().backward();
  expect_close(x.grad(), of_input(whole.x.grad()), "input");
  expect_like(layer, whole.layer);
}

// spec: T1.linear ColumnParallelLinear: outputs, gradients and initial weights of one process, with
// every option, for parts of equal and of different sizes; sequence parallelism
// spec: T1 RowParallelLinear: the same, its bias added once
TEST(TensorParallelLayers, Linear) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [&](int rank) {
      for (const bool option : {false, true})
        for (const bool sequence_parallel : {false, true})
          for (const bool bias : {false, true}) {
            column_case(ranks, rank, option, sequence_parallel, bias);
            row_case(ranks, rank, option, sequence_parallel, bias);
          }
    });
}

// spec: T1 a sequence along another dimension than the first
TEST(TensorParallelLayers, SequenceAlongSecondDimension) {
  on_ranks(2, [](int rank) {
    const auto in_batch_order = [](const Tensor& tensor) { return tensor.transpose(0, 1); };
    const Whole whole(true);
    auto column = seeded(5, [] {
      return ColumnParallelLinear(kIn, kOut,
                                  ColumnParallelLinearOptions{.gather_output = true,
                                                              .sequence_parallel = true,
                                                              .sequence_dim = 1,
                                                              .dtype = at::kDouble});
    });
    auto row = seeded(5, [] {
      return RowParallelLinear(kIn, kOut,
                               RowParallelLinearOptions{.input_is_parallel = false,
                                                        .sequence_parallel = true,
                                                        .sequence_dim = 1,
                                                        .dtype = at::kDouble});
    });
    const auto x = in_batch_order(whole.x.detach()), output = in_batch_order(whole.output);
    expect_close(column(part_of(x, 1, 2, rank)).detach(), output.detach(), "column");
    expect_close(row(x).detach(), part_of(output, 1, 2, rank), "row");
  });
}

// spec: T1.embedding VocabParallelEmbedding: a vocabulary that does not divide evenly, or leaves a
// rank without any, padding_idx; sequence parallelism
TEST(TensorParallelLayers, Embedding) {
  for (const int ranks : {1, 2, 3, 4})
    for (const std::int64_t vocab : {5, 11})
      for (const bool sequence_parallel : {false, true})
        on_ranks(ranks, [&](int rank) {
          auto whole = seeded(5, [&] {
            return torch::nn::Embedding(torch::nn::EmbeddingOptions(vocab, 4).padding_idx(-2));
          });
          whole->to(at::kDouble);
          auto layer = seeded(5, [&] {
            return VocabParallelEmbedding(
                vocab, 4,
                VocabParallelEmbeddingOptions{.padding_idx = -2,
                                              .sequence_parallel = sequence_parallel,
                                              .dtype = at::kDouble});
          });
          const auto ids = (torch::arange(kRows * 2, at::kLong) * 3).remainder(vocab).view({-1, 2});
          const auto slope = numbers({kRows, 2, 4});
          const auto part = [&](const Tensor& tensor) {
            return sequence_parallel ? part_of(tensor, 0, ranks, rank) : tensor.detach();
          };
          const auto expected = whole(ids), found = layer(ids);
          EXPECT_SAME(found.detach(), part(expected));
          (expected * slope).sum().backward();
          (found * part(slope)).sum().backward();
          EXPECT_SAME(layer->weight.detach(), like_part(whole->weight, layer->weight));
          expect_close(layer->weight.grad(), like_part(whole->weight.grad(), layer->weight),
                       "weight");
        });
}

// spec: T1 layer norm on parts of the sequence: the gradients of its parameters are sums
TEST(TensorParallelLayers, LayerNorm) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [&](int rank) {
      torch::nn::LayerNorm whole(torch::nn::LayerNormOptions({2, 4}).eps(1e-3));
      whole->to(at::kDouble);
      SequenceParallelLayerNorm layer(
          std::vector<std::int64_t>{2, 4},
          SequenceParallelLayerNormOptions{.eps = 1e-3, .dtype = at::kDouble});
      const auto x = numbers({kRows, 2, 4}).requires_grad_(), slope = numbers({kRows, 2, 4}, 3);
      const auto mine = part_of(x, 0, ranks, rank).clone().requires_grad_();
      const auto expected = whole(x), found = layer(mine);
      expect_close(found.detach(), part_of(expected, 0, ranks, rank), "output");
      (expected * slope).sum().backward();
      (found * part_of(slope, 0, ranks, rank)).sum().backward();
      expect_close(mine.grad(), part_of(x.grad(), 0, ranks, rank), "input");
      expect_close(layer->weight.grad(), whole->weight.grad(), "weight");
      expect_close(layer->bias.grad(), whole->bias.grad(), "bias");
      SequenceParallelLayerNorm bare(std::vector<std::int64_t>{4},
                                     SequenceParallelLayerNormOptions{.elementwise_affine = false});
      EXPECT_TRUE(bare->parameters().empty());
    });
}

// spec: T1 modules are cloned, moved and printed as torch's are
TEST(TensorParallelLayers, AreModules) {
  on_ranks(2, [](int rank) {
    ColumnParallelLinear layer(4, 6, ColumnParallelLinearOptions{.dtype = at::kBFloat16});
    EXPECT_EQ(layer->weight.scalar_type(), at::kBFloat16);
    layer->to(at::kDouble);
    const auto copy = seeded(
        1, [&] { return std::dynamic_pointer_cast<ColumnParallelLinearImpl>(layer->clone()); });
    EXPECT_SAME(copy->weight.detach(), layer->weight.detach());
    EXPECT_EQ(tensor_parallel_part(copy->weight)->offsets,
              (std::vector<std::int64_t>{3 * rank, 0}));
    std::ostringstream text;
    text << *layer;
    EXPECT_EQ(text.str(), "muster::ColumnParallelLinear(in_features=4, out_features=6, ranks=2)");
  });
}

// spec: T1 errors: inputs of a wrong last dimension, ids out of the vocabulary, on every rank
TEST(TensorParallelLayers, Refusals) {
  on_ranks(2, [](int) {
    const auto said = [](const auto& call) { return message_of<DistError>(call); };
    ColumnParallelLinear column(4, 6);
    EXPECT_HAS(said([&] {
                 column(torch::zeros({3, 5}));
               }),
               "ColumnParallelLinear(in_features=4, out_features=6, ranks=2): the input is [3, 5], "
               "and its last dimension should be 4");
    RowParallelLinear row(4, 6);
    EXPECT_HAS(said([&] {
                 row(torch::zeros({3, 4}));
               }),
               "its last dimension should be 2, this rank's part; input_is_parallel = false");
    VocabParallelEmbedding embedding(10, 4);
    EXPECT_HAS(said([&] {
                 embedding(torch::tensor({1, 10, 2}));
               }),
               "VocabParallelEmbedding: id is not in the vocabulary of 10, 0 to 9: 10");
    EXPECT_HAS(said([&] { embedding(torch::tensor({1, -1})); }), "0 to 9: -1");
    EXPECT_HAS(said([&] {
                 VocabParallelEmbedding(10, 4, VocabParallelEmbeddingOptions{.padding_idx = 10});
               }),
               "padding_idx 10 is not in the vocabulary of 10");
    SequenceParallelLayerNorm norm(std::vector<std::int64_t>{4});
    EXPECT_HAS(said([&] { norm(torch::zeros({4, 3})); }), "its last dimensions should be [4]");
  });
}

}  // namespace
}  // namespace muster
