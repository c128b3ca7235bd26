// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/packed_broadcast.h"

#include <gtest/gtest.h>

#include "core/group/testing/ranks.h"

namespace muster::testing {
namespace {

using parallel::PackedBroadcast;

/// Small and large tensors of several dtypes, one with gaps, one transposed on some ranks, a
/// scalar, and an empty one.
std::vector<at::Tensor> tensors_of(int rank) {
  const auto numbers = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return torch::arange(100 * rank, 100 * rank + c10::multiply_integers(sizes), torch::kFloat64)
        .to(dtype)
        .view(sizes);
  };
  auto turned = numbers({4, 6}, torch::kFloat32);
  if (rank % 2 == 1) turned = turned.t().contiguous().t();
  return {numbers({3}, torch::kFloat32),
          numbers({}, torch::kInt64),
          numbers({5, 2}, torch::kBFloat16),
          numbers({10, 3}, torch::kFloat64).select(1, 1),
          torch::empty({0, 4}),
          numbers({40, 40}, torch::kBool),
          turned,
          numbers({100, 100}, torch::kFloat64),
          numbers({7}, torch::kComplexDouble)};
}

TEST(PackedBroadcast, GivesEveryMemberTheRootsValues) {
  on_ranks(3, [](int rank) {
    PackedBroadcast packed;
    for (const int root : {0, 2, 1}) {
      const auto expected = tensors_of(root);
      const auto tensors = tensors_of(rank);
      std::vector<std::int64_t> versions;
      for (const auto& tensor : tensors) versions.push_back(tensor._version());
      packed.send_from(default_group(), root, tensors);
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_SAME(tensors[i], expected[i])
            << "tensor " << i << " from " << root << " on " << rank;
        if (rank != root && tensors[i].numel() > 0) {
          EXPECT_GT(tensors[i]._version(), versions[i])
              << "autograd knows of the change of tensor " << i;
        }
      }
    }
    packed.send_from(default_group(), 0, {});
  });
}

TEST(PackedBroadcast, NeedNotTellAutograd) {
  on_ranks(2, [](int rank) {
    const auto tensors = tensors_of(rank);
    PackedBroadcast().send_from(default_group(), 0, tensors, PackedBroadcast::Autograd::bypass);
    const auto expected = tensors_of(0);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_SAME(tensors[i], expected[i]);
      EXPECT_EQ(tensors[i]._version(), tensors_of(rank)[i]._version()) << "tensor " << i;
    }
  });
}

// Memory between the elements of a tensor with gaps is not written.
TEST(PackedBroadcast, LeavesWhatLiesBetween) {
  on_ranks(2, [](int rank) {
    const auto whole = torch::full({10, 3}, rank);
    PackedBroadcast().send_from(default_group(), 1, {whole.select(1, 1)});
    EXPECT_SAME(whole.select(1, 1), torch::full({10}, 1));
    EXPECT_SAME(whole.select(1, 0), torch::full({10}, rank));
  });
}

}  // namespace
}  // namespace muster::testing
