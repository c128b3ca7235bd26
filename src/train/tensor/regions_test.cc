// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/autograd/autograd.h>

#include "train/tensor/testing/nets.h"

namespace muster {
namespace {

using at::Tensor;
using testing::expect_close;
using testing::message_of;
using testing::numbers;
using testing::on_ranks;
using testing::part_of;

Tensor gradient(const Tensor& loss, const Tensor& input) {
  return torch::autograd::grad({loss}, {input}, {}, true, true)[0];
}

// spec: T1 copy, reduce, scatter and gather, of parts of any size, with gradients of second order
TEST(TensorParallelRegions, CopyReduceScatterGather) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [&](int rank) {
      const int sum = ranks * (ranks + 1) / 2;
      const auto x = numbers({2, 5}).requires_grad_();
      const auto copied = copy_to_tensor_parallel_region(x);
      EXPECT_SAME(copied.detach(), x.detach());
      EXPECT_SAME(gradient((copied * (rank + 1)).sum(), x), torch::full({2, 5}, sum, at::kDouble));
      const auto of_copied = gradient((copied.square() * (rank + 1)).sum(), x);
      expect_close(of_copied.detach(), (2 * sum * x).detach(), "copy of squares");
      expect_close(gradient(of_copied.sum(), x), torch::full({2, 5}, 2 * sum, at::kDouble),
                   "copy, second order");
      const auto reduced = reduce_from_tensor_parallel_region(x * (rank + 1));
      expect_close(reduced.detach(), x.detach() * sum, "reduce");
      EXPECT_SAME(gradient(reduced.sum(), x), torch::full({2, 5}, rank + 1, at::kDouble));
      const auto of_reduced = gradient(reduced.square().sum(), x);
      expect_close(of_reduced.detach(), (2 * sum * (rank + 1) * x).detach(), "reduce, squared");
      expect_close(gradient((of_reduced / (rank + 1)).sum(), x),
                   torch::full({2, 5}, 2.0 * ranks * (rank + 1), at::kDouble),
                   "reduce, second order");

      const auto part = scatter_to_tensor_parallel_region(x);
      EXPECT_SAME(part.detach(), part_of(x, 1, ranks, rank));
      const auto weights = numbers({2, 5}, 3);
      const auto first = gradient((part.square() * part_of(weights, 1, ranks, rank)).sum(), x);
      expect_close(first.detach(), (2 * x * weights).detach(), "scatter");
      const auto second =
          gradient((scatter_to_tensor_parallel_region(first)).sum(), x);  // once on every rank
      expect_close(second.detach(), 2 * weights, "scatter, second order");

      const auto mine = part_of(x, 1, ranks, rank).clone().requires_grad_();
      const auto whole = gather_from_tensor_parallel_region(mine, nullptr, -1, 5);
      EXPECT_SAME(whole.detach(), x.detach());
      expect_close(gradient((whole * weights).sum(), mine), part_of(weights, 1, ranks, rank),
                   "gather");
      const auto bent = gradient((whole.square() * weights).sum(), mine);
      expect_close(gradient(bent.sum(), mine), part_of(2 * weights, 1, ranks, rank),
                   "gather, second order");
    });
}

// spec: T1.sequence sequence parallelism: all_gather and reduce_scatter along any dimension
TEST(TensorParallelRegions, Sequences) {
  for (const int ranks : {1, 2, 3, 4})
    for (const std::int64_t dim : {0, 1, -1})
      on_ranks(ranks, [&](int rank) {
        const int sum = ranks * (ranks + 1) / 2;
        const auto x = numbers({12, 12}).requires_grad_(), weights = numbers({12, 12}, 3);
        const auto along = [&](const Tensor& tensor) { return part_of(tensor, dim, ranks, rank); };
        const auto part = scatter_to_sequence_parallel_region(x, nullptr, dim);
        EXPECT_SAME(part.detach(), along(x));
        expect_close(gradient((part * along(weights)).sum(), x), weights, "scatter");

        const auto mine = along(x).clone().requires_grad_();
        for (const bool parallel : {true, false}) {
          const auto whole = gather_from_sequence_parallel_region(mine, nullptr, dim, parallel);
          EXPECT_SAME(whole.detach(), x.detach());
          // In a tensor-parallel region the gradient is the sum of what all ranks did with it.
          expect_close(gradient((whole * weights * (parallel ? rank + 1 : 1)).sum(), mine),
                       along(weights) * (parallel ? sum : 1), "gather");
        }
        const auto reduced =
            reduce_scatter_to_sequence_parallel_region(x * (rank + 1), nullptr, dim);
        expect_close(reduced.detach(), along(x) * sum, "reduce_scatter");
        expect_close(gradient((reduced * along(weights)).sum(), x), weights * (rank + 1),
                     "gradient of reduce_scatter");
      });
}

// spec: T1 errors: sizes that do not fit the group, and ranks outside of it
TEST(TensorParallelRegions, Refusals) {
  on_ranks(3, [](int rank) {
    const auto x = numbers({4, 5});
    const auto said = [](const auto& call) { return message_of<DistError>(call); };
    EXPECT_HAS(said([&] { scatter_to_sequence_parallel_region(x); }),
               "dimension 0 of [4, 5], does not divide evenly among the 3 ranks");
    EXPECT_HAS(said([&] { reduce_scatter_to_sequence_parallel_region(x, nullptr, 1); }),
               "dimension 1 of [4, 5]");
    EXPECT_HAS(said([&] { gather_from_tensor_parallel_region(x, nullptr, -1, 6); }),
               "this rank's part of 6 has 2 elements, and dimension 1 of the tensor 5");
    EXPECT_HAS(said([&] { scatter_to_tensor_parallel_region(x, nullptr, 2); }),
               "has no dimension 2");
    const auto group = new_group({.ranks = {0, 1}});
    if (rank == 2) {
      EXPECT_HAS(said([&] { copy_to_tensor_parallel_region(x, group); }), "not a member");
      EXPECT_HAS(
          said([&] { ColumnParallelLinear(2, 2, ColumnParallelLinearOptions{.group = group}); }),
          "ColumnParallelLinear: this rank is not a member of the group");
    }
  });
}

// spec: T1 parts are declared for parameters of other layers too, and end with them
TEST(TensorParallelParts, OfAnyTensor) {
  auto mine = torch::zeros({2, 3});
  EXPECT_FALSE(tensor_parallel_part(mine));
  set_tensor_parallel_part(mine, {.sizes = {4, 3}, .offsets = {2, 0}});
  EXPECT_EQ(tensor_parallel_part(mine)->offsets, (std::vector<std::int64_t>{2, 0}));
  mine.set_data(torch::zeros({2, 3}, at::kDouble));
  EXPECT_EQ(tensor_parallel_part(mine)->sizes, (std::vector<std::int64_t>{4, 3}));
  EXPECT_FALSE(tensor_parallel_part(mine.clone()));
  EXPECT_HAS(message_of<DistError>([&] {
               set_tensor_parallel_part(mine, {.sizes = {4, 3}, .offsets = {3, 0}});
             }),
             "the parameter is [2, 3] at [3, 0], which is no part of [4, 3]");
}

}  // namespace
}  // namespace muster
