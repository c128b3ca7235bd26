// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/bucket_plan.h"

#include <gtest/gtest.h>

#include <numeric>

namespace muster::parallel {
namespace {

std::vector<std::size_t> in_order(std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

std::vector<ParameterFacts> of_bytes(std::initializer_list<std::int64_t> sizes) {
  std::vector<ParameterFacts> facts;
  for (const auto bytes : sizes) facts.push_back({.bytes = bytes});
  return facts;
}

// spec: K1.bucket_cap_mb bucket_cap_mb
TEST(BucketPlan, ABucketIsClosedOnceItHoldsItsLimit) {
  const auto facts = of_bytes({40, 40, 40, 100, 100, 10});
  EXPECT_EQ(plan_buckets(facts, in_order(6), 80, 200),
            (std::vector<BucketIndices>{{0, 1}, {2, 3, 4}, {5}}));
}

TEST(BucketPlan, NothingIsSplitAndNothingIsLost) {
  const auto facts = of_bytes({1000, 0, 1, 1000});
  EXPECT_EQ(plan_buckets(facts, in_order(4), 1, 1), (std::vector<BucketIndices>{{0}, {1, 2}, {3}}));
  EXPECT_TRUE(plan_buckets({}, {}, 1, 1).empty());
}

TEST(BucketPlan, KeepsTheGivenOrder) {
  const auto facts = of_bytes({10, 10, 10, 10});
  const std::vector<std::size_t> order{3, 1, 0, 2};
  EXPECT_EQ(plan_buckets(facts, order, 20, 20), (std::vector<BucketIndices>{{3, 1}, {0, 2}}));
}

TEST(BucketPlan, DtypesAndDevicesDoNotShareABucket) {
  auto facts = of_bytes({10, 10, 10, 10, 10});
  facts[1].dtype = facts[3].dtype = at::kDouble;
  facts[4].device = c10::Device(at::kMeta);
  // The doubles' bucket is full at 20 bytes; of the others, the one started first comes first.
  EXPECT_EQ(plan_buckets(facts, in_order(5), 20, 1000),
            (std::vector<BucketIndices>{{0, 2}, {1, 3}, {4}}));
  EXPECT_EQ(plan_buckets(facts, in_order(5), 1000, 1000),
            (std::vector<BucketIndices>{{0, 2}, {1, 3}, {4}}));
}

TEST(BucketPlan, EachKindHasASmallFirstBucket) {
  auto facts = of_bytes({10, 10, 10, 10, 10, 10});
  facts[1].dtype = facts[3].dtype = facts[5].dtype = at::kHalf;
  EXPECT_EQ(plan_buckets(facts, in_order(6), 10, 20),
            (std::vector<BucketIndices>{{0}, {1}, {2, 4}, {3, 5}}));
}

}  // namespace
}  // namespace muster::parallel
