// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/collectives.h"
#include "muster/device_mesh.h"
#include "testing/thrown.h"

namespace muster::testing {
namespace {

at::Tensor numbers(std::vector<std::int64_t> sizes) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return torch::sin(torch::arange(count, at::kDouble) * 1.3).view(sizes);
}

class ShardedTensors : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedTensors, ::testing::Values(1, 2, 3, 4));

// spec: M5 ShardedTensor in C++: a box of the whole, by its placement
TEST_P(ShardedTensors, AreBoxesOfTheWhole) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    const Group world = default_group();
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{5, 3}, {1, 7}, {0, 2}, {8}})
      for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(sizes.size()); ++dim) {
        const at::Tensor whole = numbers(sizes);
        const auto part = ShardedTensor::distribute(whole, {world}, {Placement::shard(dim)});
        const auto chunks = whole.chunk(ranks, dim);
        const bool any = static_cast<std::size_t>(rank) < chunks.size();
        if (any) EXPECT_TRUE(part.local().equal(chunks[static_cast<std::size_t>(rank)]));
        if (!any) EXPECT_EQ(part.local().numel(), 0);
        EXPECT_EQ(part.sizes(), sizes);
        EXPECT_TRUE(part.full().equal(whole));
      }
    const at::Tensor same = numbers({3});
    const ShardedTensor replica(same, {3}, {world}, {Placement::replicate()});
    EXPECT_TRUE(replica.full().equal(same));
    const ShardedTensor partial(same, {3}, {world}, {Placement::partial()});
    EXPECT_TRUE(partial.full().allclose(same * ranks));
  });
}

// spec: M5 over a mesh: hybrid, and one dimension divided twice
TEST(ShardedTensorsOnAMesh, AreDividedByEachDimension) {
  on_ranks(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto groups = mesh.get_all_groups();
    const at::Tensor whole = numbers({7, 5});
    const auto shard = [](std::int64_t dim) { return Placement::shard(dim); };
    for (const auto& placements :
         std::vector<std::vector<Placement>>{{Placement::replicate(), shard(0)},
                                             {shard(0), shard(1)},
                                             {shard(0), shard(0)},
                                             {shard(1), Placement::replicate()}}) {
      const auto part = ShardedTensor::distribute(whole, groups, placements);
      EXPECT_TRUE(part.full().equal(whole));
      at::Tensor box = whole;
      for (std::int64_t dim = 0; dim < 2; ++dim)
        box =
            box.narrow(dim, part.offsets()[static_cast<std::size_t>(dim)], part.local().size(dim));
      EXPECT_TRUE(part.local().equal(box));
      const ShardedTensor again(part.local(), {7, 5}, mesh, placements);
      EXPECT_EQ(again.offsets(), part.offsets());
    }
  });
}

// spec: M6.norms tensors over different groups: each element counts once, all ranks get one number
TEST(ShardedTensorsOnAMesh, HaveOneNorm) {
  constexpr auto kInfinite = std::numeric_limits<double>::infinity();
  on_ranks(4, [&](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto groups = mesh.get_all_groups();
    const at::Tensor first = numbers({7, 5}), second = numbers({6}) * 3, third = numbers({2, 3, 2});
    for (const double type : {1.0, 2.0, 3.5, kInfinite}) {
      const std::vector<ShardedTensor> tensors{
          ShardedTensor::distribute(first, groups, {Placement::replicate(), Placement::shard(0)}),
          ShardedTensor::distribute(second, groups, {Placement::shard(0), Placement::shard(0)}),
          ShardedTensor::distribute(third, groups,
                                    {Placement::replicate(), Placement::replicate()}),
          ShardedTensor::distribute(third, {default_group()}, {Placement::shard(1)})};
      const at::Tensor all =
          torch::cat({first.view({-1}), second, third.view({-1}), third.view({-1})});
      const double expected = at::linalg_vector_norm(all, type).item<double>();
      const double norm = get_total_norm(tensors, type);
      EXPECT_NEAR(norm, expected, 1e-12 * expected);
      const at::Tensor seen = torch::empty({4}, at::kDouble);
      all_gather_into_tensor(seen, torch::tensor({norm}, at::kDouble));
      EXPECT_TRUE((seen == norm).all().item<bool>());
      EXPECT_EQ(clip_grad_norm_(tensors, expected / 2, type), norm);
      EXPECT_NEAR(get_total_norm(tensors, type), expected / 2, 1e-5 * expected);
      EXPECT_TRUE(tensors[2].local().allclose(third * 0.5, 1e-5));
    }
  });
}

// spec: M5.refusal what is no part, or has no norm, is refused by name
TEST(ShardedTensorsOnAMesh, RefuseWhatIsNoPart) {
  on_ranks(2, [](int rank) {
    const Group world = default_group();
    const auto text_of = [](const auto& make) { return message_of<DistError>([&] { make(); }); };
    const at::Tensor rows = numbers({3, 2});
    EXPECT_HAS(text_of([&] {
                 ShardedTensor(rows, {4, 2}, {world}, {Placement::shard(0)});
               }),
               "[2, 2]");
    EXPECT_HAS(text_of([&] {
                 ShardedTensor(rows, {3, 2}, {world}, {Placement::shard(2)});
               }),
               "dimension 2");
    EXPECT_HAS(text_of([&] {
                 ShardedTensor(rows, {3, 2}, {world, world}, {Placement::shard(0)});
               }),
               "1 placements for 2 groups");
    EXPECT_HAS(text_of([&] { ShardedTensor::distribute(rows, {world}, {Placement::partial()}); }),
               "partial()");
    const ShardedTensor sum(rows, {3, 2}, {world}, {Placement::partial()});
    EXPECT_HAS(text_of([&] { get_total_norm({sum}); }), "partial()");
    EXPECT_HAS(text_of([&] { get_total_norm({}); }), "no tensor");
    const auto alone = new_group({.ranks = std::vector{rank}, .use_local_synchronization = true});
    EXPECT_HAS(text_of([&] {
                 get_total_norm({ShardedTensor(rows, {3, 2}, {alone}, {Placement::shard(0)}),
                                 sum.like(rows * 1)});
               }),
               "partial()");
    EXPECT_HAS(text_of([&] {
                 get_total_norm({ShardedTensor(rows, {3, 2}, {alone}, {Placement::shard(0)}),
                                 ShardedTensor(rows, {3, 2}, {world}, {Placement::replicate()})});
               }),
               "lie on different ranks");
  });
}

}  // namespace
}  // namespace muster::testing
