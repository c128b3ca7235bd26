// SPDX-License-Identifier: BSD-3-Clause
// Nodes that lost their hold and come back, on a clock that stands where the test puts it.
#include <initializer_list>

#include "jobs/membership/testing/epoch_rules.h"

namespace muster::membership {
namespace {

using std::chrono::seconds;

class ReturningNodes : public testing::EpochRules {
 protected:
  /// One node may go on alone, and one that fell silent is waited for.
  void keep_the_state() {
    options.silence_patience = seconds(60);
    options.keeps_state = true;
    options.min_nodes = 1;
  }
  /// So, with a, b and c, of which a and b have told of their commits.
  void begin_with_two_holders() {
    keep_the_state();
    begin_with_incarnations();
    for (const char* name : {"a", "b"}) say_state(name, 650);
  }
};

// spec: L14.node a node that lost its hold and comes back with its workers before the next epoch
// has its seat again, and nothing counts against its host
TEST_F(ReturningNodes, WhoComesBackWithItsWorkersHasItsSeatAgain) {
  options.repair_timeout = seconds(10);
  options.blacklist_after = 1;
  options.max_nodes = 4;
  begin_with_incarnations();
  die("b");
  EXPECT_EQ(view.lost().size(), 1u);
  EXPECT_FALSE(decide().commit);
  come_back("b'", "b");
  EXPECT_TRUE(view.lost().empty());
  EXPECT_TRUE(view.vacant().empty());
  EXPECT_EQ(view.seats().at(1).name, "b'");
  EXPECT_EQ(view.seated(), 3u);
  now += seconds(20);
  EXPECT_FALSE(decide().commit);
  die("b'");
  come_back("b''", "b");
  EXPECT_FALSE(decide().commit);
  die("a");
  EXPECT_EQ(view.proposer(), "b''");
  now += seconds(10);
  EXPECT_EQ(commit(), (Slots{{1, "b''"}, {2, "c"}}));
}

// spec: L14.service a node that took its place again while the service still knows its earlier hold
// gets no second seat, and keeps its own when that hold ends
TEST_F(ReturningNodes, AnEarlierHoldThatLivesGivesNoSecondSeat) {
  options.max_nodes = 4;
  begin_with_incarnations();
  come_back("b'", "b");
  EXPECT_FALSE(decide().commit) << "there is room for a fourth node, but b has a seat";
  die("b");
  EXPECT_TRUE(view.lost().empty());
  EXPECT_EQ(view.seats().at(1).name, "b'");
  EXPECT_FALSE(decide().commit);
}

// spec: L14.node a node that comes back after an epoch without it is a new member; a failure that
// it reported under its earlier name stays its own
TEST_F(ReturningNodes, AfterAnEpochWithoutItANodeIsNew) {
  options.max_restarts = 1;
  begin_with_incarnations();
  die("b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  come_back("b'", "b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b'"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().members.at(1).joined, 3);

  say("c", NodePhase::failed, 7);
  die("c");
  come_back("c'", "c", NodePhase::failed);
  ASSERT_EQ(view.failures().size(), 1u);
  EXPECT_EQ(view.failures().front().name, "c'");
  EXPECT_TRUE(decide().commit) << "the failure counts as before";
  EXPECT_EQ(decide().restarts, 1);
}

// spec: L14.service a launcher that gave its workers up under a hold that lives is another node:
// its seat is lost
TEST_F(ReturningNodes, AnotherIncarnationUnderTheSameNameIsAnotherNode) {
  begin_with_incarnations();
  say("b", NodeReport{.host = "b", .incarnation = "b, again"});
  EXPECT_EQ(view.lost().size(), 1u);
  EXPECT_EQ(view.waiting().size(), 1u);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
  EXPECT_EQ(view.epoch().members.at(1).joined, 2);
}

// spec: L14.node a launcher that took the name of a member before the epoch came has no seat in it
TEST_F(ReturningNodes, ANameThatHasAnotherHolderIsNoMember) {
  options.max_nodes = 3;
  for (const char* name : {"a", "b", "c"}) say(name, NodeReport{.host = name, .incarnation = name});
  const Epoch epoch = make_epoch(view, decide());
  die("b");
  say("b", NodeReport{.host = "b", .incarnation = "another"});
  view.apply(Update{++revision, false, {}, epoch, revision}, now);
  EXPECT_EQ(view.lost().size(), 1u);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
}

// spec: L14.service more nodes of one host than its troubles are kept for come back
TEST_F(ReturningNodes, ManyNodesOfOneHostComeBack) {
  constexpr int kNodes = 40;
  options.max_nodes = kNodes;
  const auto name = [](int number) { return "n" + std::to_string(number); };
  for (int i = 0; i < kNodes; ++i) say(name(i), NodeReport{.host = "h", .incarnation = name(i)});
  commit();
  for (int i = 0; i < kNodes; ++i) die(name(i));
  for (int i = 0; i < kNodes; ++i)
    say(name(i) + "'",
        NodeReport{.phase = NodePhase::running, .epoch = 1, .host = "h", .incarnation = name(i)});
  EXPECT_TRUE(view.lost().empty());
  EXPECT_FALSE(decide().commit);
}

// spec: L14.node, L6 a node that falls silent after training may come back for as long as it keeps
// its workers; then, or at once where it has died, the job ends: nothing is trained again
TEST_F(ReturningNodes, AfterTrainingASilentNodeIsWaitedFor) {
  options.silence_patience = seconds(60);
  begin_with_incarnations();
  for (const char* name : {"a", "b", "c"}) say_trained(name, 1, NodePhase::running);
  const JobView before = view;
  fall_silent("b");
  const Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_EQ(decision.again, now + seconds(60));
  come_back("b'", "b");
  for (const char* name : {"a", "b'", "c"}) say_trained(name, 1, NodePhase::succeeded);
  EXPECT_EQ(decide().state, JobState::succeeded);

  view = before;
  fall_silent("b");
  now += seconds(60);
  EXPECT_EQ(decide().state, JobState::failed);
  view = before;
  die("b");
  EXPECT_EQ(decide().state, JobState::failed);
}

// spec: L14.node, L14.end a node without a seat that falls silent is waited for, if its launcher
// keeps the newest commit there is and all members are gone that had a newer state
TEST_F(ReturningNodes, ASilentNodeThatKeepsTheNewestCommitIsWaitedFor) {
  keep_the_state();
  options.max_nodes = 2;
  const auto say_kept = [&](const std::string& name, const std::string& incarnation,
                            std::int64_t kept_in) {
    NodeReport report{.host = incarnation, .incarnation = incarnation};
    report.kept_in = kept_in;
    say(name, report);
  };
  say("a", NodeReport{.host = "a", .incarnation = "a"});
  now += options.last_call;
  commit();
  say_state("a", 650);
  say_kept("b", "b", 1);
  const JobView waiting = view;
  const auto since_then = since;
  const auto lose_both = [&](std::int64_t kept_by_c) {
    view = waiting;
    since = since_then;
    fall_silent("b");
    EXPECT_FALSE(decide().commit) << "a has the state";
    say_kept("c", "c", kept_by_c);
    die("a");
  };
  lose_both(1);
  EXPECT_TRUE(decide().commit) << "c keeps one as new";
  lose_both(0);
  const Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_EQ(decision.awaited, std::vector<int>{-1});
  EXPECT_EQ(decision.again, now + seconds(60));
  EXPECT_TRUE(decision.waits_for.starts_with("a node without a place (b) fell silent, and no node"))
      << decision.waits_for;
  say_kept("b'", "b", 1);
  EXPECT_EQ(commit(), (Slots{{0, "c"}, {1, "b'"}}));
  lose_both(0);
  now += seconds(60);
  EXPECT_TRUE(decide().commit);
}

// spec: L14.node, L14.end so is one that lost its seat while another member had the state
TEST_F(ReturningNodes, ASilentMemberThatWasLeftOutIsWaitedForStill) {
  keep_the_state();
  begin_with_incarnations();
  say_state("a", 650);
  NodeReport keeps = view.nodes().at("b").report;
  keeps.kept_in = 1;
  say("b", keeps);
  fall_silent("b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  die("a");
  EXPECT_FALSE(decide().commit);
  now += seconds(60);
  EXPECT_TRUE(decide().commit);
}

// spec: L14.node, L14.lost_state a member whose workers had the commits when it fell silent, and
// that an epoch left out, is waited for once no other has them; also by nodes that come later
TEST_F(ReturningNodes, ASilentMemberWithTheStateIsWaitedForStill) {
  keep_the_state();
  for (const bool silent : {true, false}) {
    view = {};
    since.clear();
    begin_with_incarnations();
    for (const char* name : {"a", "b"}) say_state(name, 650);
    end("b", silent);
    EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
    EXPECT_EQ(view.epoch().keepers.size(), silent ? 1u : 0u);
    now += seconds(10);
    die("c");
    commit();
    say("d", NodeReport{.host = "d", .incarnation = "d"});
    const JobView late = seen_late();
    die("a");
    JobView then = late;
    then.apply(Update{revision, false, {{"a", {}, 0, false}}, {}, 0}, now);
    for (const JobView* each : std::initializer_list<const JobView*>{&view, &then}) {
      const Decision decision = next_epoch(now, *each, options);
      EXPECT_EQ(decision.commit, !silent);
      if (!silent) continue;
      EXPECT_EQ(decision.awaited, std::vector<int>{-1});
      EXPECT_EQ(decision.awaited_until, now + seconds(50));
    }
    if (!silent) continue;
    come_back("b'", "b");
    EXPECT_TRUE(view.silent_keepers().empty());
    EXPECT_TRUE(decide().commit);
  }
}

// spec: L14.node a node that reads of a silent one long after that epoch waits no longer than the
// others, once a later epoch has told it since when
TEST_F(ReturningNodes, WhoComesLateWaitsNoLonger) {
  begin_with_two_holders();
  fall_silent("b");
  const TimePoint silent_at = now;
  commit();
  now += seconds(40);
  JobView late = seen_late();
  ASSERT_EQ(late.silent_keepers().size(), 1u);
  EXPECT_EQ(late.silent_keepers().front().since, now) << "it cannot know yet";
  die("c");
  late.apply(Update{revision, false, {{"c", {}, 0, false}}, {}, 0}, now);
  commit();
  const Epoch next = decode_epoch(encode(view.epoch())).value();
  late.apply(Update{++revision, false, {}, next, revision}, now);
  ASSERT_EQ(late.silent_keepers().size(), 1u);
  EXPECT_EQ(late.silent_keepers().front().since, silent_at);
}

// spec: L14.node a silent node with the commits comes back, gets a seat, and falls silent again
// before it has heard of that: it is waited for
TEST_F(ReturningNodes, WhoFallsSilentAgainIsWaitedForAgain) {
  begin_with_two_holders();
  fall_silent("b");
  commit();
  die("c");
  commit();
  NodeReport back{.epoch = 1, .host = "b", .incarnation = "b"};
  back.phase = NodePhase::running;
  say("b'", back);
  back.phase = NodePhase::waiting;  // its launcher has not got what its workers have
  say("b'", back);
  EXPECT_EQ(view.nodes().at("b'").offered_in(), 1);
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  die("a");
  EXPECT_EQ(commit().size(), 2u);
  fall_silent("b'");
  const Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_FALSE(decision.awaited.empty());
}

// spec: L14.node an epoch tells of those that have been silent for the shortest time
TEST_F(ReturningNodes, TheNewestSilentNodesAreRecorded) {
  begin_with_two_holders();
  for (int i = 0; i < 16; ++i) {
    NodeReport keeps{.host = "old", .incarnation = "old" + std::to_string(i)};
    keeps.kept_in = 1;
    say(keeps.incarnation, keeps);
    fall_silent(keeps.incarnation);
  }
  fall_silent("b");
  commit();
  ASSERT_EQ(view.epoch().keepers.size(), 16u);
  EXPECT_EQ(view.epoch().keepers.front().incarnation, "old1");
  EXPECT_EQ(view.epoch().keepers.back().incarnation, "b");
}

// spec: L14.lost_state a member that tells that its workers' state is gone, and then falls silent
// and is left out, is not waited for; nor is one whose commits the job has given up
TEST_F(ReturningNodes, WhoHasNoCommitIsNotWaitedFor) {
  begin_with_two_holders();
  NodeReport none = view.nodes().at("b").report;
  none.state_in = 0;
  none.none_in = 1;
  say("b", none);
  fall_silent("b");
  commit();
  EXPECT_TRUE(view.silent_keepers().empty());
  fall_silent("c");
  commit();
  ASSERT_EQ(view.silent_keepers().size(), 1u) << "the epoch gave it to all its members";
  NodeReport lost = view.nodes().at("a").report;
  lost.lost_in = view.epoch().number;
  lost.state_in = lost.committed = 0;
  say("a", lost);
  die("a");
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  EXPECT_TRUE(decide().commit);
}

// spec: L14.node where no member has the state, a node that keeps the newest commit gets a seat
// before one that came first
TEST_F(ReturningNodes, WhoKeepsTheNewestCommitGoesFirst) {
  options.silence_patience = seconds(60);
  options.keeps_state = true;
  options.max_nodes = 1;
  say("a", NodeReport{.host = "a", .incarnation = "a"});
  commit();
  say_state("a", 650);
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  NodeReport keeps{.host = "b", .incarnation = "b"};
  keeps.kept_in = 1;
  say("b", keeps);
  die("a");
  EXPECT_EQ(commit(), (Slots{{0, "b"}}));
}

// spec: L7, L14.node of a divided state a silent node that was left out is waited for while it may
// have the only copy of a part: until the next commit
TEST_F(ReturningNodes, WhoMayHaveTheOnlyPartIsWaitedForUntilTheNextCommit) {
  options.silence_patience = seconds(60);
  options.keeps_state = true;
  begin_with_incarnations();
  const auto say_parts = [&](const std::string& name) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = view.epoch().number;
    report.state_divided = true;
    say(name, report);
  };
  for (const char* name : {"a", "b", "c"}) say_parts(name);
  fall_silent("c");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  const JobView before = view;
  const auto then = since;
  die("b");
  EXPECT_FALSE(decide().commit) << "the copy of b's part is on c";
  come_back("c'", "c");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "c'"}}));
  view = before;
  since = then;
  say_parts("a");
  die("b");
  EXPECT_TRUE(decide().commit);
}

// spec: L14.service while the service has just been silent, no epoch begins without members that
// fell silent, whether they had a state or not; who has died or come back is not waited for
TEST_F(ReturningNodes, WhoFellSilentWithTheServiceMayReturn) {
  options.silence_patience = seconds(60);
  options.min_nodes = 1;
  begin_with_incarnations();
  const TimePoint returning = now + seconds(5);
  const auto decide_then = [&] { return next_epoch(now, view, options, returning); };
  fall_silent("b");
  EXPECT_TRUE(decide().commit);
  EXPECT_FALSE(decide_then().commit);
  EXPECT_EQ(decide_then().again, returning);
  const JobView lost = view;
  come_back("b'", "b");
  EXPECT_FALSE(decide_then().commit);
  EXPECT_EQ(decide_then().again, TimePoint::max());
  die("c");
  EXPECT_TRUE(decide_then().commit);
  view = lost;
  now = returning;
  EXPECT_TRUE(decide_then().commit);
  now += seconds(52);
  EXPECT_EQ(next_epoch(now, view, options, now + seconds(5)).again, now + seconds(3));
  now += seconds(3);
  EXPECT_TRUE(next_epoch(now, view, options, now + seconds(5)).commit) << "it is always slow";

  view = {};
  since.clear();
  options.last_call = Duration(0);
  say("a", NodeReport{.host = "a", .incarnation = "a"});
  EXPECT_TRUE(decide().commit);
  EXPECT_FALSE(next_epoch(now, view, options, now + seconds(1)).commit) << "others had come";
  now += options.join_timeout;
  EXPECT_TRUE(next_epoch(now, view, options, now + seconds(1)).commit) << "it is always slow";
}

}  // namespace
}  // namespace muster::membership
