// SPDX-License-Identifier: BSD-3-Clause
// Groups that fail while all processes live, on a clock that stands where the test puts it.
#include "jobs/membership/testing/epoch_rules.h"

namespace muster::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class GroupTroubles : public testing::EpochRules {
 protected:
  GroupTroubles() { options.max_restarts = 1; }
  void blame(const std::string& name, std::vector<std::int32_t> slots) {
    NodeReport report = view.nodes().at(name).report;
    report.troubled_in = view.epoch().number;
    report.blamed = std::move(slots);
    report.trouble = name + " has words for it";
    say(name, report);
  }
  /// No node knows whom to blame.
  void fail_all(std::int64_t committed) {
    for (const char* name : {"a", "b", "c"}) {
      NodeReport report = view.nodes().at(name).report;
      add_trouble(report, view.epoch().number, {}, "a store was closed", committed);
      say(name, report);
    }
    now += milliseconds(500);
  }
  void blame_each_other() {
    blame("a", {1});
    blame("b", {0});
    blame("c", {1});
    now += milliseconds(500);
  }
};

// spec: L15 the members of a group that failed go on together, and that is no restart
TEST_F(GroupTroubles, TheSameMembersGoOn) {
  begin_with_incarnations();
  blame("a", {1});
  EXPECT_FALSE(decide().commit);
  EXPECT_EQ(decide().again, now + milliseconds(1500));
  blame_each_other();
  EXPECT_EQ(decide().restarts, 0);
  EXPECT_EQ(decide().reason,
            "the group of epoch 1 failed and no process has ended: between node 0 (a) and node 1 "
            "(b) (a has words for it); the same nodes go on");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
  EXPECT_TRUE(view.group_troubles().empty());
  EXPECT_FALSE(decide().commit);
}

// spec: L15 a link that fails again costs one node, which is seated again once the time of the rule
// has passed
TEST_F(GroupTroubles, ABadLinkCostsANodeForATime) {
  begin_with_incarnations();
  blame_each_other();
  commit();
  now += seconds(20);
  blame_each_other();
  EXPECT_NE(decide().reason.find("; the others go on without node 1 (b)"), std::string::npos)
      << decide().reason;
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().restarts, 0);
  EXPECT_FALSE(decide().commit) << "b waits, and is not seated at once";
  EXPECT_EQ(decide().again, now + options.failures.window);
  now += options.failures.window;
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
}

// spec: L15 where no node may be left out the failures count as restarts, and end the job by name
TEST_F(GroupTroubles, WithoutAWayOutRestartsAreUsedUp) {
  options.min_nodes = 3;
  begin_with_incarnations();
  for (int restarts = 0; restarts <= 1; ++restarts) {
    blame_each_other();
    EXPECT_EQ(commit().size(), 3u);
    EXPECT_EQ(view.epoch().restarts, restarts);
  }
  blame_each_other();
  const Decision decision = decide();
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_NE(decision.reason.find("between node 0 (a) and node 1 (b), again within"),
            std::string::npos)
      << decision.reason;
}

// spec: L15 failures that no node is blamed for use the restarts up, unless commits are made
// between them
TEST_F(GroupTroubles, FailuresWithoutBlameEnd) {
  begin_with_incarnations();
  for (int restarts = 0; restarts <= 1; ++restarts) {
    fail_all(5);
    EXPECT_EQ(commit().size(), 3u);
    EXPECT_EQ(view.epoch().restarts, restarts);
    now += seconds(1800);
  }
  fail_all(6);
  EXPECT_EQ(commit().size(), 3u);
  EXPECT_EQ(view.epoch().restarts, 1) << "a commit was made, long after the last failure";
  fail_all(6);
  const Decision decision = decide();
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_EQ(decision.reason,
            "the group of epoch 4 failed and no process has ended, again within 60 s or without a "
            "new commit since (a store was closed), and no restart is left");
}

// spec: L15 a node that waits takes the seat of one with a bad link, also if the job is at its
// least number of nodes
TEST_F(GroupTroubles, ASpareReplacesABadNode) {
  options.min_nodes = 3;
  begin_with_incarnations();
  blame_each_other();
  commit();
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  EXPECT_FALSE(decide().commit) << "there is no seat for it";
  blame_each_other();
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "d"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().restarts, 0);
}

// spec: L15 a node that was left out is seated before its time if the job cannot go on without it
TEST_F(GroupTroubles, ABarredNodeIsBetterThanTooFew) {
  options.min_nodes = 2;
  options.wait_for_nodes = false;
  begin_with_incarnations();
  blame_each_other();
  commit();
  blame_each_other();
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  die("c");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "b"}}));
  EXPECT_EQ(view.epoch().state, JobState::running);
}

// spec: L15 what members say of a failure is short, and their words are no part of the epochs that
// follow
TEST_F(GroupTroubles, AnEpochDoesNotCarryTheFailureBeforeIt) {
  begin_with_incarnations();
  const std::size_t before = encode(view.epoch()).size();
  std::string words(255, 'x');
  for (int i = 0; i < 1000; ++i) words += "\u00e4";
  for (const char* name : {"a", "b", "c"}) {
    NodeReport report = view.nodes().at(name).report;
    add_trouble(report, 1, {0, 1, 2}, words, 0);
    EXPECT_EQ(report.trouble, std::string(255, 'x')) << "cut before a character of two bytes";
    say(name, report);
  }
  now += milliseconds(500);
  const Epoch next = make_epoch(view, decide());
  ASSERT_EQ(next.members.size(), 3u);
  constexpr std::size_t kOfAPair = 24;
  EXPECT_LE(encode(next).size(), before + next.reason.size() + kOfAPair * next.blames.size());
}

// spec: L15 the death behind it is answered by its own rules; what is said of an older epoch is
// void
TEST_F(GroupTroubles, ADeathComesFirst) {
  begin_with_incarnations();
  blame("a", {1});
  blame("c", {1});
  die("b");
  EXPECT_EQ(decide().reason, "node 1 (b) is gone");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  NodeReport late = view.nodes().at("c").report;
  late.troubled_in = 1;
  say("c", late);
  EXPECT_TRUE(view.group_troubles().empty());
}

// spec: L15 a worker that fails slowly is a worker's failure, and no epoch of the same members
// comes before its exit; an end that was announced in an earlier epoch is void
TEST_F(GroupTroubles, AnAnnouncedEndIsAWorkersFailure) {
  options.max_restarts = 2;
  begin_with_incarnations();
  NodeReport ends = view.nodes().at("b").report;
  ends.ending_in = 1;
  say("b", ends);
  blame("a", {1});
  blame("c", {1});
  now += seconds(5);
  EXPECT_FALSE(decide().commit);
  say("b", NodePhase::failed, 3);
  EXPECT_EQ(decide().reason, "b has words for it");
  commit();
  EXPECT_EQ(view.epoch().restarts, 1);
  EXPECT_TRUE(view.blamed_before().empty());
  say("b", NodePhase::running);
  blame_each_other();
  EXPECT_NE(decide().reason.find("no process has ended"), std::string::npos) << decide().reason;
}

// spec: L9, L15 a group that fails because a node leaves, as was announced, makes no epoch of the
// same members, is no fault of a link, also soon after one, and the next epoch says who leaves
TEST_F(GroupTroubles, AnAnnouncedLeaveIsNoFaultOfALink) {
  begin_with_incarnations();
  blame_each_other();
  commit();
  const std::size_t known = view.blamed_before().size();
  now += seconds(6);
  NodeReport leaves = view.nodes().at("b").report;
  leaves.ending_in = view.epoch().number;
  say("b", leaves);
  EXPECT_FALSE(decide().commit) << "its workers train until their next commit";
  blame("a", {1});
  blame("c", {1});
  now += seconds(5);
  EXPECT_FALSE(decide().commit) << "its workers may take a while to end";
  say("b", NodePhase::leaving);
  EXPECT_EQ(decide().reason, "b has words for it");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  EXPECT_LT(view.blamed_before().size(), known) << "what was said of the node goes with it";
  EXPECT_EQ(view.epoch().restarts, 0);
  EXPECT_TRUE(view.epoch().left_out.empty());
}

// spec: L15 who was blamed for a death is not remembered: the next failure is the first, for the
// others and for the node that took the slot
TEST_F(GroupTroubles, ADeathIsNotRememberedAsABadLink) {
  begin_with_incarnations();
  blame("a", {1});
  blame("c", {1});
  die("b");
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "d"}, {2, "c"}}));
  EXPECT_TRUE(view.blamed_before().empty());
  now += seconds(20);
  blame("a", {1});
  blame("c", {1});
  blame("d", {0});
  now += milliseconds(500);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "d"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().restarts, 0);
}

// spec: L15 a launcher that was killed under a service that sees it late is a loss, not a failure
// without a death
TEST_F(GroupTroubles, ADeathThatIsSeenLateIsALoss) {
  options.failures.death_patience = seconds(7);
  begin_with_incarnations();
  blame("a", {1});
  blame("c", {1});
  now += seconds(5);
  EXPECT_FALSE(decide().commit);
  die("b");
  EXPECT_EQ(decide().reason, "node 1 (b) is gone");
  commit();
  EXPECT_TRUE(view.blamed_before().empty());
}

// spec: L15 a node that came after the failures decides as those that have seen them: the record of
// the epoch says what was blamed and who was left out
TEST_F(GroupTroubles, WhoComesLaterDecidesTheSame) {
  begin_with_incarnations();
  blame_each_other();
  commit();
  now += seconds(20);
  blame("a", {1});
  blame("b", {0});
  blame("c", {1});
  const JobView proposes = seen_late();
  now += milliseconds(500);
  EXPECT_EQ(next_epoch(now, proposes, options).reason, decide().reason);
  EXPECT_EQ(next_epoch(now, proposes, options).left_out, std::vector<int>{1});
  commit();
  now += seconds(20);
  die("c");  // another epoch follows
  commit();
  now += seconds(5);
  const JobView seats = seen_late();
  EXPECT_FALSE(next_epoch(now, seats, options).commit) << "b waits";
  EXPECT_EQ(decide().again, now + options.failures.window - seconds(25));
  EXPECT_GE(next_epoch(now, seats, options).again, decide().again) << "never before its time";
}

// spec: L15 an epoch's record of failures is small however many there were: the oldest are dropped
TEST_F(GroupTroubles, TheRecordOfFailuresStaysSmall) {
  constexpr int kNodes = 60;
  options.max_nodes = kNodes;
  const auto name_of = [](int slot) { return "n" + std::to_string(slot); };
  for (int slot = 0; slot < kNodes; ++slot)
    say(name_of(slot),
        NodeReport{.wanted_slot = slot, .host = name_of(slot), .incarnation = name_of(slot)});
  commit();
  options.min_nodes = kNodes;
  std::vector<std::int32_t> all;
  for (int slot = 0; slot < kNodes; ++slot) all.push_back(slot);
  for (int slot = 0; slot < kNodes; ++slot) blame(name_of(slot), all);
  now += milliseconds(500);
  commit();
  ASSERT_EQ(view.blamed_before().size(), 512u) << "of 1830 pairs";
  EXPECT_EQ(view.blamed_before().back().pair, (SlotPair{kNodes - 1, kNodes - 1}));
  EXPECT_LE(encode(view.epoch()).size(), 32u << 10);
}

// spec: L15 the only node that has the job's state in memory is never left out: a node that it
// cannot reach is, or the same nodes go on
TEST_F(GroupTroubles, TheOnlyHolderOfTheStateStays) {
  begin_with_incarnations();
  say_state("b", 7);
  const JobView begun = view;
  blame_each_other();
  commit();
  blame_each_other();
  EXPECT_EQ(commit(), (Slots{{1, "b"}, {2, "c"}})) << "b is blamed as often and has a higher slot";

  view = begun;
  for (int i = 0; i < 2; ++i) {
    blame("a", {1});
    blame("b", {0, 2});
    blame("c", {1});
    now += milliseconds(500);
    EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}})) << "no other can reach it";
  }
  EXPECT_EQ(view.epoch().restarts, 1);
}

// spec: L15, L7 one link that stays cut costs a job with shards one node and no commit, without any
// restart; a second one, before the others have committed, may not cost another node its part
TEST_F(GroupTroubles, ACutLinkTakesOnePartOfADividedState) {
  options.max_restarts = 0;
  begin_with_incarnations();
  const auto say_parts = [&](const std::string& name) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = view.epoch().number;
    report.state_divided = true;
    report.committed = 9;
    say(name, report);
  };
  for (const char* name : {"a", "b", "c"}) say_parts(name);
  blame_each_other();
  commit();
  EXPECT_EQ(view.epoch().parts_gone, 0);
  blame_each_other();  // it did not form
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}})) << "b's part is on c";
  EXPECT_EQ(view.epoch().restarts, 0);
  EXPECT_EQ(view.epoch().parts_gone, 1);
  EXPECT_EQ(seen_late().epoch().parts_gone, 1);
  EXPECT_FALSE(seen_late().may_lose_a_part());

  const JobView not_formed = view;
  const auto others_blame = [&] {
    blame("a", {2});
    blame("c", {0});
    now += milliseconds(500);
  };
  others_blame();
  EXPECT_EQ(commit().size(), 2u) << "the first time";
  others_blame();
  EXPECT_EQ(decide().state, JobState::failed) << "a's part is on a alone, and b's on c";
  EXPECT_NE(decide().reason.find("and no restart is left"), std::string::npos);
  options.max_restarts = 1;
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().restarts, 1);

  view = not_formed;
  others_blame();
  commit();
  say_parts("a");  // a commit, whose parts have copies
  others_blame();
  EXPECT_EQ(commit().size(), 1u);
}

// spec: L15 a node that takes a slot does not inherit what was said of the one before
TEST_F(GroupTroubles, BlameStaysWithTheNode) {
  begin_with_incarnations();
  blame_each_other();
  commit();
  EXPECT_EQ(view.blamed_before().size(), 2u) << "what c heard of b is remembered too";
  die("b");
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "d"}, {2, "c"}}));
  EXPECT_TRUE(view.blamed_before().empty());
}

}  // namespace
}  // namespace muster::membership
