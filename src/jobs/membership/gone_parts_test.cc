// SPDX-License-Identifier: BSD-3-Clause
// Parts of a divided state that ended with the workers that had them, as their nodes tell.
#include "jobs/membership/testing/epoch_rules.h"

namespace muster::membership {
namespace {

using std::chrono::seconds;

class GoneParts : public testing::EpochRules {
 protected:
  void SetUp() override {
    options.silence_patience = seconds(60);
    options.keeps_state = true;
    options.max_restarts = 10;
    begin_with_incarnations();
    for (const char* name : {"a", "b", "c"}) say_parts(name, 1, 0);
  }
  void say_parts(const std::string& name, std::int64_t state_in, std::int64_t none_in) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = state_in;
    report.state_divided = true;
    report.none_in = none_in;
    say(name, report);
  }
};

// spec: L7, L14.node a part that is gone is a loss at once: then the neighbour, which may have the
// only copy, is waited for in the same epoch
TEST_F(GoneParts, CountInTheSameEpoch) {
  EXPECT_TRUE(view.may_lose_a_part());
  say_parts("b", 0, 1);
  EXPECT_FALSE(view.may_lose_a_part());
  fall_silent("c");
  EXPECT_FALSE(decide().commit);
  EXPECT_FALSE(next_epoch(now, seen_late(), options).commit);
}

// spec: L7, L14.node a node of several workers, one of which took its part with it, has the others'
// parts: it is a holder, and one part is gone, in the next epoch too, until the next commit
TEST_F(GoneParts, OfOneWorkerOfSeveral) {
  say_parts("b", 1, 1);
  EXPECT_EQ(view.state_holders(), 3u);
  EXPECT_FALSE(view.may_lose_a_part());
  say("b", NodePhase::failed);
  EXPECT_EQ(commit().size(), 3u);
  EXPECT_EQ(view.epoch().parts_gone, 1);
  EXPECT_FALSE(view.may_lose_a_part());
  EXPECT_FALSE(seen_late().may_lose_a_part());
  const JobView before = view;
  fall_silent("c");
  EXPECT_FALSE(decide().commit);
  view = before;
  say_parts("a", 2, 0);
  EXPECT_TRUE(view.may_lose_a_part());
  fall_silent("c");
  EXPECT_TRUE(decide().commit);
}

// spec: L7, L14.node a part of which its node only says that it has none any more counts in no
// later epoch, whatever others say of that commit
TEST_F(GoneParts, StayGoneWithoutAWordOfTheEpoch) {
  say_parts("b", 0, 0);
  say("b", NodePhase::running);
  EXPECT_EQ(view.state_holders(), 2u);
  say("a", NodePhase::failed);
  EXPECT_EQ(commit().size(), 3u);
  EXPECT_EQ(view.epoch().state_in, 1);
  EXPECT_EQ(view.state_holders(), 2u);
  EXPECT_EQ(view.epoch().parts_gone, 1);
  say("a", NodePhase::failed);
  EXPECT_EQ(commit().size(), 3u);
  EXPECT_EQ(view.state_holders(), 2u);
  fall_silent("c");
  EXPECT_FALSE(decide().commit);
}

}  // namespace
}  // namespace muster::membership
