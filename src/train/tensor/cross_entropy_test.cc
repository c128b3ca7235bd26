// SPDX-License-Identifier: BSD-3-Clause
#include "train/tensor/testing/nets.h"

namespace muster {
namespace {

using at::Tensor;
using testing::expect_close;
using testing::message_of;
using testing::numbers;
using testing::on_ranks;
using testing::part_of;

namespace F = torch::nn::functional;

/// Targets of 2 x 6, some of them ignored.
Tensor targets(std::int64_t vocab) {
  auto target = (torch::arange(12, at::kLong) * 5).remainder(vocab).view({2, 6});
  target[0][1] = -7;
  target[1][4] = -7;
  return target;
}

void expect_torchs(int ranks, int rank, std::int64_t vocab, double scale, double smoothing,
                   const decltype(ParallelCrossEntropyOptions::reduction)& reduction) {
  const auto whole = (numbers({2, 6, vocab}) * scale).requires_grad_();
  const auto mine = part_of(whole, -1, ranks, rank).clone().requires_grad_();
  const auto target = targets(vocab);
  const auto expected = F::cross_entropy(
      whole.flatten(0, 1), target.flatten(),
      F::CrossEntropyFuncOptions().ignore_index(-7).label_smoothing(smoothing).reduction(
          reduction));
  const auto found = parallel_cross_entropy(
      mine, target, vocab,
      {.ignore_index = -7, .reduction = reduction, .label_smoothing = smoothing});
  expect_close(found.flatten().detach(), expected.flatten().detach(), "loss");
  const auto slope = numbers(found.sizes(), 2);
  (found * slope).sum().backward();
  (expected * slope.view_as(expected)).sum().backward();
  expect_close(mine.grad(), part_of(whole.grad(), -1, ranks, rank), "logits");
}

// spec: T1.cross_entropy parallel cross entropy: losses and gradients of torch's, with every
// reduction, ignore_index and label_smoothing, for a vocabulary of any size
TEST(ParallelCrossEntropy, IsTorchs) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [&](int rank) {
      for (const std::int64_t vocab : {5, 11})
        for (const double smoothing : {0.0, 0.1}) {
          expect_torchs(ranks, rank, vocab, 1, smoothing, torch::kMean);
          expect_torchs(ranks, rank, vocab, 1, smoothing, torch::kSum);
          expect_torchs(ranks, rank, vocab, 1, smoothing, torch::kNone);
        }
    });
}

// spec: T1 parallel cross entropy is stable for large logits, and takes 16-bit ones
TEST(ParallelCrossEntropy, LargeAndNarrowLogits) {
  on_ranks(2, [](int rank) {
    const auto target = torch::tensor({0, 3});
    const auto whole = torch::tensor({{1e5, 0., 0., 1e5}, {-1e5, 0., 0., -1e5}}, at::kDouble);
    const auto loss =
        parallel_cross_entropy(part_of(whole, -1, 2, rank), target, 4, {.reduction = torch::kNone});
    expect_close(
        loss, F::cross_entropy(whole, target, F::CrossEntropyFuncOptions().reduction(torch::kNone)),
        "large");
    const auto narrow = numbers({2, 4}).to(at::kBFloat16);
    const auto low = parallel_cross_entropy(part_of(narrow, -1, 2, rank), target, 4);
    EXPECT_SAME(low, F::cross_entropy(narrow.to(at::kFloat), target).to(at::kBFloat16));
  });
}

// spec: T1 errors: targets out of the vocabulary, on every rank; logits that are no part of it
TEST(ParallelCrossEntropy, Refusals) {
  on_ranks(2, [](int) {
    const auto said = [](const Tensor& logits, const Tensor& target) {
      return message_of<DistError>([&] { parallel_cross_entropy(logits, target, 6); });
    };
    const auto logits = torch::zeros({2, 3});
    EXPECT_HAS(said(logits, torch::tensor({1, 6})),
               "parallel_cross_entropy: target is not in the vocabulary of 6, 0 to 5: 6");
    EXPECT_HAS(said(logits, torch::tensor({-1, 5})), "0 to 5: -1");
    EXPECT_HAS(said(torch::zeros({2, 6}), torch::tensor({1, 2})),
               "its last dimension should be 3, this rank's part of the vocabulary of 6");
    EXPECT_HAS(said(logits, torch::tensor({1, 2, 3})), "logits are [2, 3], and targets [3]");
  });
}

}  // namespace
}  // namespace muster
