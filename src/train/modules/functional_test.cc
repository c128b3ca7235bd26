// SPDX-License-Identifier: BSD-3-Clause
#include "muster/functional.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using at::Tensor;
using testing::message_of;
using testing::on_ranks;

constexpr int kRanks = 3;

Tensor leaf(int rank, at::IntArrayRef shape) {
  return (torch::arange(c10::multiply_integers(shape), at::kDouble).view(shape) + 10 * rank)
      .requires_grad_();
}

Tensor gradient(const Tensor& loss, const Tensor& input) {
  return torch::autograd::grad({loss}, {input}, {}, true, true)[0];
}

// spec: T4 in C++: all_reduce, broadcast, reduce, gather, scatter and their gradients, of second
// order too
TEST(Functional, ReductionsAndRootedCalls) {
  on_ranks(kRanks, [](int rank) {
    const auto x = leaf(rank, {4});
    const auto sum = nn::all_reduce(x);
    EXPECT_SAME(sum.detach(), (leaf(0, {4}) + leaf(1, {4}) + leaf(2, {4})).detach());
    EXPECT_SAME(gradient((sum * (rank + 1)).sum(), x), torch::full({4}, 6.0, at::kDouble));
    const auto average = nn::all_reduce(x, {.op = ReduceOp::AVG});
    EXPECT_SAME(gradient((average * 3 * (rank + 1)).sum(), x), torch::full({4}, 6.0, at::kDouble));

    const auto slope = gradient((nn::broadcast(x, 1) * x.detach() * (rank + 1)).sum(), x);
    EXPECT_SAME(slope, rank == 1 ? (leaf(0, {4}) + 2 * leaf(1, {4}) + 3 * leaf(2, {4})).detach()
                                 : torch::zeros({4}, at::kDouble));

    const auto whole = nn::reduce(x, 2);
    if (rank == 2) EXPECT_SAME(whole.detach(), sum.detach());
    EXPECT_SAME(gradient((whole * (rank == 2 ? 5 : 0)).sum(), x),
                torch::full({4}, 5.0, at::kDouble));

    const auto parts = nn::gather(x, 1);
    ASSERT_EQ(parts.size(), 3U);
    if (rank == 1) EXPECT_SAME(parts[2].detach(), leaf(2, {4}).detach());
    EXPECT_SAME(gradient((parts[0] + 2 * parts[1] + 3 * parts[2]).sum(), x),
                torch::full({4}, rank + 1.0, at::kDouble));

    TensorList given;
    for (int i = 0; i < kRanks; ++i) given.push_back(leaf(3 * rank + i, {2}));
    const auto mine = nn::scatter(given, 2);
    EXPECT_SAME(mine.detach(), leaf(6 + rank, {2}).detach());
    const auto first =
        torch::autograd::grad({(mine * mine * (rank + 1)).sum()}, given, {}, true, true);
    for (int i = 0; i < kRanks; ++i)
      EXPECT_SAME(first[static_cast<std::size_t>(i)],
                  rank == 2 ? 2 * (i + 1) * given[static_cast<std::size_t>(i)]
                            : torch::zeros({2}, at::kDouble));
    const auto second = gradient((first[1] * first[1]).sum(), given[1]);
    EXPECT_SAME(second, rank == 2 ? 32 * given[1] : torch::zeros({2}, at::kDouble));
    EXPECT_HAS(message_of<DistError>([&] { nn::scatter({x}); }), "1 tensors for the 3 members");
  });
}

// spec: T4 in C++: all_gather, reduce_scatter, all_to_all and their forms of one tensor, of even
// and uneven sizes
TEST(Functional, ExchangesAndGradients) {
  on_ranks(kRanks, [](int rank) {
    const auto x = leaf(rank, {2, 2});
    const auto parts = nn::all_gather(x);
    EXPECT_SAME(gradient(((parts[0] + 2 * parts[1] + 3 * parts[2]) * (rank + 1)).sum(), x),
                torch::full({2, 2}, 6.0 * (rank + 1), at::kDouble));
    const auto memory = torch::empty({6, 2}, at::kDouble);
    const auto whole = nn::all_gather_into_tensor(memory, x);
    EXPECT_EQ(whole.data_ptr(), memory.data_ptr());
    EXPECT_FALSE(memory.requires_grad());
    EXPECT_SAME(gradient((whole * (rank + 1)).sum(), x), torch::full({2, 2}, 6.0, at::kDouble));

    TensorList sent, received;
    for (int i = 0; i < kRanks; ++i) {
      sent.push_back(leaf(rank, {i + 1}));
      received.push_back(torch::empty({rank + 1}, at::kDouble));
    }
    const auto reduced = nn::reduce_scatter(torch::empty({rank + 1}, at::kDouble), sent);
    auto slopes = torch::autograd::grad({(reduced * (rank + 1)).sum()}, sent);
    for (int i = 0; i < kRanks; ++i)
      EXPECT_SAME(slopes[static_cast<std::size_t>(i)], torch::full({i + 1}, i + 1.0, at::kDouble));
    const auto exchanged = nn::all_to_all(received, sent);
    slopes = torch::autograd::grad(
        {(exchanged[0] + exchanged[1] + exchanged[2]).sum() * (rank + 1)}, sent);
    for (int i = 0; i < kRanks; ++i)
      EXPECT_SAME(slopes[static_cast<std::size_t>(i)], torch::full({i + 1}, i + 1.0, at::kDouble));

    const auto rows = leaf(rank, {6});  // 1, 2 and 3 of them
    const auto one = nn::all_to_all_single(torch::empty({3 * (rank + 1)}, at::kDouble), rows,
                                           {rank + 1, rank + 1, rank + 1}, {1, 2, 3});
    EXPECT_SAME(gradient((one * (rank + 1)).sum(), rows),
                torch::tensor({1., 2., 2., 3., 3., 3.}, at::kDouble));
  });
}

// spec: T4 in C++: a group of some ranks, whose roots are ranks of the default group; others get
// their tensors back
TEST(Functional, InAGroup) {
  on_ranks(kRanks, [](int rank) {
    const auto group = new_group({.ranks = {1, 2}});
    const auto x = leaf(rank, {2});
    const auto y = nn::broadcast(nn::all_reduce(x, {.group = group}), 2, {.group = group});
    const auto slope = gradient((y * (rank + 1)).sum(), x);
    EXPECT_SAME(slope, torch::full({2}, rank == 0 ? 1.0 : 5.0, at::kDouble));
    EXPECT_EQ(nn::all_gather(x, {.group = group}).size(), rank == 0 ? 0U : 2U);
  });
}

}  // namespace
}  // namespace muster
