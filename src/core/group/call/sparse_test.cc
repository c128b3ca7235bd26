// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/sparse.h"

#include <atomic>

#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

/// Rank r has values at rows r and r + 1 of 4, row 3 twice (not coalesced), and none on rank 3.
at::Tensor rows(int rank, at::ScalarType dtype, bool dense_part) {
  const std::vector<std::int64_t> at =
      rank == 3 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{rank, rank + 1, 3, 3};
  const auto count = static_cast<std::int64_t>(at.size());
  const auto indices = torch::tensor(at, at::kLong).view({1, count});
  auto values = torch::arange(count * (dense_part ? 2 : 1), at::kLong) + 10 * rank + 1;
  values = dense_part ? values.view({count, 2}) : values;
  return torch::sparse_coo_tensor(
      indices, values.to(dtype),
      dense_part ? std::vector<std::int64_t>{4, 2} : std::vector<std::int64_t>{4});
}

// spec: F22 all_reduce of sparse COO float tensors
TEST(Sparse, AllReduceAddsWhatTheRanksHave) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf}) {
    for (const bool dense_part : {false, true}) {
      on_ranks(4, [&](int rank) {
        at::Tensor wanted;
        for (int from = 0; from < 4; ++from) {
          const auto theirs = rows(from, dtype, dense_part).to_dense();
          wanted = wanted.defined() ? wanted + theirs : theirs;
        }
        auto tensor = rows(rank, dtype, dense_part);
        EXPECT_EQ(all_reduce(tensor), nullptr);
        EXPECT_TRUE(tensor.is_sparse() && tensor.is_coalesced());
        EXPECT_SAME(tensor.to_dense(), wanted);
        tensor = rows(rank, dtype, dense_part);
        const auto work = all_reduce(tensor, {.async_op = true});
        EXPECT_TRUE(work->wait() && work->is_completed());
        EXPECT_SAME(tensor.to_dense(), wanted);
      });
    }
  }
}

// spec: F22 mismatched sparse tensors are named on every rank, and the group stays usable
TEST(Sparse, DifferentTensorsAreNamedOnEveryRank) {
  std::atomic<int> named{0};
  on_ranks(3, [&](int rank) {
    const auto of = [](std::vector<std::int64_t> shape, at::ScalarType dtype) {
      return torch::ones(shape, dtype).to_sparse();
    };
    EXPECT_HAS(message_of<DistError>([&] { all_reduce(of({rank == 2 ? 5 : 4}, at::kFloat)); }),
               "rank 2 gave Float of shape [5]");
    EXPECT_HAS(
        message_of<DistError>([&] { all_reduce(of({4}, rank == 1 ? at::kDouble : at::kFloat)); }),
        "rank 1 gave Double");
    EXPECT_HAS(
        message_of<DistError>([&] { all_reduce(of({4}, at::kFloat), {.op = ReduceOp::MAX}); }),
        "SUM only");
    auto tensor = of({4}, at::kFloat);
    all_reduce(tensor);
    EXPECT_SAME(tensor.to_dense(), torch::full({4}, 3.0f));
    ++named;
  });
  EXPECT_EQ(named.load(), 3);
}

}  // namespace
}  // namespace muster
