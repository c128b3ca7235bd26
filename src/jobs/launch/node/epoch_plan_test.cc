// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/epoch_plan.h"

#include <gtest/gtest.h>

#include "jobs/membership/job_view.h"

namespace muster::launch {
namespace {

/// The plan of the node in the first of these seats, each named by the epoch in which it was got.
EpochPlan plan_with_seats_of(const std::vector<std::int64_t>& joined) {
  membership::Epoch epoch;
  epoch.number = 7;
  for (std::size_t i = 0; i < joined.size(); ++i) {
    membership::NodeReport report;
    report.incarnation = "node " + std::to_string(i);
    report.details =
        encode(NodeDetails{NodeFacts{1, "default", "a host", 0}, "a launcher", "a", 1});
    epoch.members.push_back(
        {static_cast<std::int32_t>(i), report.incarnation, encode(report), joined[i]});
  }
  const auto plan = plan_of(epoch, {"node 0", "node 0", 1});
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? *plan : EpochPlan();
}

// spec: J4 only a node that came after another leaves alone without the program: one of those that
// came first ends the job, also if they lost their seats and got them again
TEST(EpochPlan, ANodeJoinedLaterIfAnotherWasThereBefore) {
  EXPECT_FALSE(plan_with_seats_of({1, 1}).joined_later);
  EXPECT_FALSE(plan_with_seats_of({1, 5}).joined_later);
  EXPECT_TRUE(plan_with_seats_of({5, 1}).joined_later);
  EXPECT_FALSE(plan_with_seats_of({3, 3, 5}).joined_later) << "all were seated again";
  EXPECT_FALSE(plan_with_seats_of({2}).joined_later) << "there is no other node";
}

TEST(EpochPlan, ANodeWithoutASeatHasJoinedNothing) {
  membership::Epoch epoch;
  epoch.number = 2;
  const auto plan = plan_of(epoch, {"node 0", "node 0", 1});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->node, -1);
  EXPECT_FALSE(plan->joined_later);
}

}  // namespace
}  // namespace muster::launch
