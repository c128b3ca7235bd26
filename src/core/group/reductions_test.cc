// SPDX-License-Identifier: BSD-3-Clause
#include "muster/collectives.h"

#include <cmath>

#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using testing::kReducible;
using testing::message_of;
using testing::on_ranks;
using testing::reduced;
using testing::same_bytes;
using testing::values;

// spec: F3 all_reduce in place, complex; F14 SUM; F15 every reducible dtype
TEST(Reductions, AllReduceSumsEveryDtype) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : kReducible) {
      auto tensor = values(rank, {2, 5}, dtype);
      const auto before = tensor;
      all_reduce(tensor);
      EXPECT_TRUE(before.is_same(tensor));
      EXPECT_SAME(tensor, reduced(3, {2, 5}, dtype, ReduceOp::SUM));
    }
  });
}

// spec: F3 bitwise identical on every rank
TEST(Reductions, AllReduceGivesTheSameBitsEverywhere) {
  on_ranks(4, [](int rank) {
    torch::Tensor tensor;
    {
      const auto table = torch::arange(4 * 10007, torch::kDouble).view({4, 10007});
      tensor = torch::sin(table[rank] * 1.1).to(torch::kFloat) * 1e3;
    }
    all_reduce(tensor);
    std::vector<at::Tensor> all(4);
    for (auto& each : all) each = torch::empty_like(tensor);
    all_gather(all, tensor);
    for (const auto& each : all) EXPECT_TRUE(same_bytes(each, tensor));
  });
}

// spec: F14 PRODUCT, MIN, MAX, AVG divides by the group's size; F19 AVG truncates integers towards
// zero
TEST(Reductions, AllReduceWithEveryArithmeticOp) {
  on_ranks(3, [](int rank) {
    for (const auto dtype :
         {at::kByte, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      for (const ReduceOp op : {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::AVG}) {
        auto tensor = values(rank, {9}, dtype);
        all_reduce(tensor, {.op = op});
        EXPECT_TRUE(
            torch::allclose(tensor.to(at::kDouble), reduced(3, {9}, dtype, op).to(at::kDouble)))
            << tensor << op.kind() << dtype;
      }
    }
    auto negative = torch::tensor({rank == 0 ? -5 : 0});
    all_reduce(negative, {.op = ReduceOp::AVG});
    EXPECT_EQ(negative.item<int>(), -1);
  });
}

// spec: F14 BAND, BOR, BXOR on integers and bool
TEST(Reductions, BitOperations) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
      for (const ReduceOp op : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
        auto tensor = values(rank, {9}, dtype);
        all_reduce(tensor, {.op = op});
        EXPECT_SAME(tensor, reduced(3, {9}, dtype, op));
      }
    }
  });
}

// spec: F14 an operation that a dtype lacks is a clear error; F15 types that can only be moved
TEST(Reductions, ImpossibleReductionsAreNamed) {
  on_ranks(2, [](int) {
    for (const ReduceOp op : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
      EXPECT_HAS(message_of<DistError>([&] { all_reduce(torch::zeros({2}), {.op = op}); }),
                 "float32");
      EXPECT_HAS(message_of<DistError>(
                     [&] { all_reduce(torch::zeros({2}, at::kComplexFloat), {.op = op}); }),
                 "complex64");
    }
    for (const ReduceOp op : {ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PRODUCT})
      EXPECT_HAS(message_of<DistError>(
                     [&] { all_reduce(torch::zeros({2}, at::kComplexDouble), {.op = op}); }),
                 "complex128");
    EXPECT_HAS(message_of<DistError>([&] { all_reduce(torch::zeros({2}, at::kFloat8_e5m2)); }),
               "all_reduce");
    EXPECT_HAS(message_of<DistError>([&] { reduce(torch::zeros({2}, at::kUInt16), {.dst = 0}); }),
               "reduce");
    auto after = torch::ones({2});
    all_reduce(after);  // the group is unaffected
    EXPECT_SAME(after, torch::full({2}, 2.0));
  });
}

// spec: F19 PREMUL_SUM multiplies each rank's input by its factor, F14 reduce_op, op defaults to
// SUM
TEST(Reductions, PremulSumCarriesItsFactor) {
  on_ranks(3, [](int rank) {
    auto tensor = values(rank, {6}, at::kDouble);
    all_reduce(tensor, {.op = ReduceOp::premul_sum(0.5)});
    EXPECT_SAME(tensor, reduced(3, {6}, at::kDouble, ReduceOp::SUM) * 0.5);
    auto old = values(rank, {6});
    all_reduce(old, {.op = reduce_op::MAX});
    EXPECT_SAME(old, reduced(3, {6}, at::kFloat, ReduceOp::MAX));
    EXPECT_EQ(AllReduceOptions{}.op, ReduceOp::SUM);
    EXPECT_EQ(reduce_op::SUM, ReduceOp::SUM);
    EXPECT_EQ(reduce_op::PRODUCT, ReduceOp::PRODUCT);
    EXPECT_EQ(reduce_op::MIN, ReduceOp::MIN);
  });
}

// spec: F15 16-bit floats accumulate in float32 and round once; MIN and MAX pass NaN on
TEST(Reductions, SixteenBitFloatsRoundOnce) {
  on_ranks(4, [](int rank) {
    // 256 + 1 + 1 + 1: bfloat16 has 8 significant bits, so rounding after each step would lose
    // every 1.
    auto tensor = torch::full({3}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
    all_reduce(tensor);
    EXPECT_SAME(tensor, torch::full({3}, 259.0).to(at::kBFloat16));
    for (const ReduceOp op : {ReduceOp::MIN, ReduceOp::MAX}) {
      auto with_nan = torch::full({2}, static_cast<double>(rank));
      if (rank == 2) with_nan[1] = std::nan("");
      all_reduce(with_nan, {.op = op});
      EXPECT_EQ(with_nan[0].item<double>(), op == ReduceOp::MIN ? 0 : 3);
      EXPECT_TRUE(std::isnan(with_nan[1].item<double>()));
    }
  });
}

// spec: F4 only dst holds the result, elsewhere the tensor is as it was
TEST(Reductions, ReduceWritesOnlyOnDst) {
  on_ranks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      auto tensor = values(rank, {7});
      reduce(tensor, {.dst = root});
      EXPECT_SAME(tensor,
                  rank == root ? reduced(3, {7}, at::kFloat, ReduceOp::SUM) : values(rank, {7}));
    }
  });
}

// spec: F9 reduce_scatter lists, uneven
TEST(Reductions, ReduceScatterLists) {
  on_ranks(3, [](int rank) {
    TensorList input;
    for (int to = 0; to < 3; ++to) input.push_back(values(rank, {2 * to + 1}));
    auto mine = torch::zeros({2 * rank + 1});
    reduce_scatter(mine, input);
    EXPECT_SAME(mine, reduced(3, {2 * rank + 1}, at::kFloat, ReduceOp::SUM));
    reduce_scatter(mine, input, {.op = ReduceOp::MAX});
    EXPECT_SAME(mine, reduced(3, {2 * rank + 1}, at::kFloat, ReduceOp::MAX));
  });
}

// spec: F10 concatenated or stacked
TEST(Reductions, ReduceScatterTensor) {
  on_ranks(3, [](int rank) {
    const auto whole = reduced(3, {6, 2}, at::kLong, ReduceOp::SUM);
    auto mine = torch::zeros({2, 2}, at::kLong);
    reduce_scatter_tensor(mine, values(rank, {6, 2}, at::kLong));
    EXPECT_SAME(mine, whole.narrow(0, 2 * rank, 2));
    auto stacked = torch::zeros({2, 2}, at::kLong);
    reduce_scatter_tensor(stacked, values(rank, {3, 2, 2}, at::kLong));
    EXPECT_SAME(stacked, whole.view({3, 2, 2})[rank]);
    EXPECT_HAS(
        message_of<DistError>([&] { reduce_scatter_tensor(mine, torch::zeros({7}, at::kLong)); }),
        "[2, 2]");
  });
}

}  // namespace
}  // namespace muster
