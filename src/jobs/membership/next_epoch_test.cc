// SPDX-License-Identifier: BSD-3-Clause
// The rules, one by one, on a clock that stands where the test puts it.

#include "jobs/membership/testing/epoch_rules.h"

namespace muster::membership {
namespace {

using std::chrono::seconds;
using testing::EpochRules;

class NextEpoch : public EpochRules {};

// spec: L16.program a node that starts another program gets no seat
TEST_F(NextEpoch, AnotherProgramGetsNoSeat) {
  options.max_nodes = 3;
  options.program_id = "1";
  for (const auto& [name, program] : {std::pair{"a", "1"}, {"b", "2"}, {"c", ""}, {"d", "1"}})
    say(name, NodeReport{.host = name, .program_id = program});
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "c"}, {2, "d"}}));
}

// spec: L3.round the round completes at once when every expected node is there
TEST_F(NextEpoch, BeginsAtOnceWithAllNodes) {
  options.min_nodes = 2;
  options.max_nodes = 3;
  come("a");
  come("b");
  EXPECT_FALSE(decide().commit);
  come("c");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
  EXPECT_FALSE(decide().commit);
}

// spec: L2.last_call_timeout last_call_timeout: the first round waits so long for more than the
// least number
TEST_F(NextEpoch, TheLastCallIsForMoreThanTheLeast) {
  options.min_nodes = 1;
  options.max_nodes = 3;
  come("a");
  EXPECT_EQ(decide().again, now + seconds(30));
  now += seconds(29);
  EXPECT_FALSE(decide().commit);
  come("b");  // each arrival begins the last call anew, as in torchrun
  now += seconds(29);
  EXPECT_FALSE(decide().commit);
  now += seconds(1);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
}

// spec: L2.join_timeout join_timeout: a job that does not get its least number ends, with words
TEST_F(NextEpoch, TooFewNodesEndTheJob) {
  options.min_nodes = options.max_nodes = 2;
  come("a");
  now += options.join_timeout;
  const Decision decision = decide();
  ASSERT_TRUE(decision.commit);
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_NE(decision.reason.find("1 of at least 2 nodes"), std::string::npos) << decision.reason;
  EXPECT_NE(decision.reason.find("10 min"), std::string::npos) << decision.reason;
}

// spec: L3 a lost node makes a new epoch at once; L4 the others keep their slots
TEST_F(NextEpoch, ALossIsAnsweredAtOnceAndSurvivorsKeepTheirSlots) {
  begin(4);
  die("b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}, {3, "d"}}));
  EXPECT_EQ(view.epoch().restarts, 0);
  EXPECT_NE(view.epoch().reason.find("node 1 (b) is gone"), std::string::npos)
      << view.epoch().reason;
  come("e");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "e"}, {2, "c"}, {3, "d"}}));
}

// spec: L4 a waiting node takes the lost slot in the same epoch
TEST_F(NextEpoch, AWaitingNodeTakesTheLostSlot) {
  begin(3);
  come("spare");
  EXPECT_FALSE(decide().commit) << "the job is full";
  die("a");
  EXPECT_EQ(commit(), (Slots{{0, "spare"}, {1, "b"}, {2, "c"}}));
}

// spec: L4 two hosts that come back have their own slots again
TEST_F(NextEpoch, AHostHasItsSlotAgain) {
  begin(4);
  die("b");
  die("c");
  come("c again", "c");
  come("b again", "b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b again"}, {2, "c again"}, {3, "d"}}));
}

// spec: L2 nodes with a number of their own (--node-rank) have that slot and no other
TEST_F(NextEpoch, AWantedSlotIsTheOnlyOne) {
  options.min_nodes = options.max_nodes = 2;
  come("second", "h", 1);
  come("twin", "h", 1);
  EXPECT_FALSE(decide().commit);
  come("first", "h", 0);
  EXPECT_EQ(commit(), (Slots{{0, "first"}, {1, "second"}}));
}

// spec: L2 where the service sees losses late, a failure that a loss has caused is no restart
TEST_F(NextEpoch, AFailureWaitsForTheLossBehindIt) {
  options.max_restarts = 0;
  options.min_nodes = 2;
  options.failure_patience = seconds(6);
  begin(3);
  say("b", NodePhase::failed, 1);
  EXPECT_FALSE(decide().commit);
  EXPECT_EQ(decide().again, now + seconds(6));
  now += seconds(3);
  die("c");
  const Decision decision = decide();
  EXPECT_TRUE(decision.commit);
  EXPECT_EQ(decision.state, JobState::running);
  EXPECT_EQ(decision.restarts, 0);
}

// spec: J4 without a loss the failure counts, when the patience is over; one that was told to stop
// ends the job at once
TEST_F(NextEpoch, AFailureCountsInTheEnd) {
  options.failure_patience = seconds(6);
  begin(2);
  say("b", NodePhase::failed, 9);
  now += seconds(6);
  EXPECT_EQ(decide().state, JobState::failed);
  EXPECT_EQ(decide().exit_code, 9);
  say("a", NodePhase::stopped, 143);
  now -= seconds(6);
  EXPECT_TRUE(decide().commit);
}

// spec: J4 a worker that was killed did not fail because of a lost node: nothing waits for that,
// also when another node's failure came first
TEST_F(NextEpoch, AKilledWorkerCountsAtOnce) {
  options.failure_patience = seconds(6);
  options.max_restarts = 1;
  begin(3);
  say("b", NodePhase::failed, 1);
  EXPECT_FALSE(decide().commit);
  say_killed("c");
  EXPECT_TRUE(decide().commit);
  EXPECT_EQ(decide().restarts, 1);
}

// spec: J4 a killed worker that its launcher notices after another one counts as well
TEST_F(NextEpoch, AKilledWorkerCountsThoughNoticedSecond) {
  options.failure_patience = seconds(6);
  options.max_restarts = 1;
  begin(2);
  say("b", NodePhase::failed, 1);
  EXPECT_FALSE(decide().commit);
  say_killed("b");
  EXPECT_TRUE(decide().commit);
}

// spec: J4 a failed worker makes a new epoch, up to max_restarts; L2 however many workers failed
TEST_F(NextEpoch, AFailureRestartsUpToTheLimit) {
  options.max_restarts = 2;
  begin(2);
  for (int restart = 1; restart <= 2; ++restart) {
    say("b", NodePhase::failed, 7);
    say("a", NodePhase::failed, 1);
    EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
    EXPECT_EQ(view.epoch().restarts, restart);
  }
  say("b", NodePhase::failed, 7);
  const Decision decision = decide();
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_EQ(decision.exit_code, 7);
  EXPECT_EQ(decision.reason, "b has words for it");
}

// spec: L6 once training has ended no node joins, and a node that had joined too late is not waited
// for: neither its failure nor its loss is the job's
TEST_F(NextEpoch, TheJobEndsWithThoseThatTrained) {
  options.max_nodes = 3;
  begin(2);
  say_trained("a", 1, NodePhase::running);
  come("c");
  EXPECT_FALSE(decide().commit) << "training is over";
  begin_anew_with_c();
  for (const bool lost : {false, true}) {
    if (lost) die("c");
    EXPECT_FALSE(decide().commit) << "the others save their result";
    if (!lost) say("c", NodePhase::failed, 1);
    EXPECT_FALSE(decide().commit);
  }
  say_trained("a", 1, NodePhase::succeeded);
  EXPECT_FALSE(decide().commit) << "b saves still, although nothing was heard of it";
  say_trained("b", 1, NodePhase::succeeded);
  const Decision decision = decide();
  EXPECT_TRUE(decision.commit);
  EXPECT_EQ(decision.state, JobState::succeeded);
}

// spec: L6 who fails or is lost while it saves the result ends the job: nothing is trained again
TEST_F(NextEpoch, WhatIsLostAfterTrainingIsNotRepaired) {
  options.max_nodes = 3;
  options.max_restarts = 5;
  begin(2);
  come("c");
  begin_anew_with_c();
  const JobView before = view;
  say("b", NodePhase::failed, 7);
  Decision decision = decide();
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_EQ(decision.exit_code, 7);
  EXPECT_NE(decision.reason.find("training had ended"), std::string::npos) << decision.reason;
  view = before;
  die("b");
  decision = decide();
  EXPECT_EQ(decision.state, JobState::failed);
  EXPECT_NE(decision.reason.find("node 1 (b) is gone"), std::string::npos) << decision.reason;
}

// spec: L16 a node that was started with other numbers of nodes gets no seat
TEST_F(NextEpoch, NodesOfOtherNumbersGetNoSeat) {
  options.min_nodes = options.max_nodes = 2;
  options.join_timeout = seconds(60);
  const auto numbered = [&](const std::string& name, int least, int most) {
    NodeReport report{NodePhase::waiting, 0, -1, 0, name, {}, {}};
    report.least_nodes = least;
    report.most_nodes = most;
    say(name, report);
  };
  numbered("a", 2, 2);
  numbered("b", 3, 3);
  numbered("c", 1, 2);
  EXPECT_FALSE(decide().commit);
  numbered("d", 2, 2);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "d"}}));
}

// spec: L5 what a node says of an older epoch does not count
TEST_F(NextEpoch, AVoteOfAnOlderEpochIsVoid) {
  options.max_restarts = 5;
  begin(2);
  say("a", NodePhase::failed);
  commit();
  NodeReport late = view.nodes().at("b").report;
  late.phase = NodePhase::failed;
  late.epoch = view.epoch().number - 1;
  say("b", late);
  EXPECT_FALSE(decide().commit);
  late.phase = NodePhase::succeeded;
  say("b", late);
  EXPECT_EQ(view.succeeded(), 0u);
}

// spec: L2 a failure beside a lost node is taken for its consequence, and is no restart
TEST_F(NextEpoch, AFailureBesideALossIsNoRestart) {
  options.max_restarts = 0;
  begin(3);
  die("c");
  say("a", NodePhase::failed, 1);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  EXPECT_EQ(view.epoch().restarts, 0);
}

// spec: J4 the job has succeeded when all members have, also those that are gone since
TEST_F(NextEpoch, SuccessIsOfAll) {
  begin(2);
  say("a", NodePhase::succeeded);
  die("a");
  EXPECT_FALSE(decide().commit);
  say("b", NodePhase::succeeded);
  EXPECT_EQ(decide().state, JobState::succeeded);
  EXPECT_TRUE(commit().empty());
  come("late");
  EXPECT_FALSE(decide().commit) << "a job that has ended stays ended";
}

// spec: J4 a job that is about to end is not started again for a new node
TEST_F(NextEpoch, ANewcomerIsTooLate) {
  options.max_nodes = 3;
  begin(2);
  say("a", NodePhase::succeeded);
  come("c");
  EXPECT_FALSE(decide().commit);
  // A failure starts all again, with the new node.
  options.max_restarts = 1;
  say("b", NodePhase::failed);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
}

// Within the repair timeout a replacement is waited for; then the job shrinks
TEST_F(NextEpoch, ARepairIsTriedFirst) {
  options.repair_timeout = seconds(10);
  begin(3);
  die("a");
  EXPECT_FALSE(decide().commit);
  EXPECT_EQ(decide().again, now + seconds(10));
  now += seconds(10);
  EXPECT_EQ(commit(), (Slots{{1, "b"}, {2, "c"}}));
  die("b");
  come("d");
  EXPECT_EQ(decide().seated.size(), 1u);
}

// spec: L2 below the least number the job waits for nodes, and ends at the time's end
TEST_F(NextEpoch, BelowTheLeastItWaits) {
  options.min_nodes = options.max_nodes = 3;
  begin(3);
  die("b");
  EXPECT_FALSE(decide().commit);
  EXPECT_EQ(decide().again, now + options.join_timeout);
  options.wait_for_nodes = false;
  EXPECT_EQ(decide().state, JobState::failed);
  EXPECT_TRUE(decide().commit);
  options.wait_for_nodes = true;
  now += options.join_timeout;
  EXPECT_EQ(decide().state, JobState::failed);
  EXPECT_NE(decide().reason.find("node 1 (b) is gone"), std::string::npos) << decide().reason;
}

// spec: L5 with a majority asked for, the smaller part of the nodes does not go on
TEST_F(NextEpoch, AMinorityDoesNotGoOn) {
  options.majority = true;
  begin(4);
  die("c");
  die("d");
  const Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  options.wait_for_nodes = false;
  EXPECT_NE(decide().reason.find("more than half"), std::string::npos) << decide().reason;
}

// spec: L5 a member that has succeeded and gone is not one that the majority has lost
TEST_F(NextEpoch, WhoHasSucceededIsNoneOfALostHalf) {
  options.majority = true;
  options.max_restarts = 1;
  begin(2);
  say("a", NodePhase::succeeded);
  die("a");
  come("c");
  say("b", NodePhase::failed);
  EXPECT_EQ(commit(), (Slots{{0, "c"}, {1, "b"}}));
}

// spec: L2 a failed job that lacks nodes waits for the time, however often it is looked at
TEST_F(NextEpoch, AFailureThatLacksNodesWaitsOnce) {
  options.min_nodes = 2;
  options.max_restarts = 1;
  begin(2);
  say("a", NodePhase::succeeded);
  die("a");
  say("b", NodePhase::failed);
  const TimePoint end = now + options.join_timeout;
  EXPECT_EQ(decide().again, end);
  now += seconds(1);
  EXPECT_EQ(decide().again, end);
  now = end;
  EXPECT_EQ(decide().state, JobState::failed);
}

// A node that leaves in good order has no seat any more, and its host is not blamed.
TEST_F(NextEpoch, ANodeThatLeavesIsNotBlamed) {
  options.blacklist_after = 1;
  begin(3);
  say("a", NodePhase::leaving);
  EXPECT_EQ(decide().reason, "a has words for it");
  EXPECT_EQ(commit(), (Slots{{1, "b"}, {2, "c"}}));
  die("a");
  EXPECT_FALSE(decide().commit);
  come("a");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}, {2, "c"}}));
}

// spec: L3, L9 the next epoch tells apart who left, who fell silent and who died
TEST_F(NextEpoch, ItSaysHowEachNodeWent) {
  begin(6);
  fall_silent("b");
  EXPECT_EQ(decide().reason, "node 1 (b) is gone: it fell silent");
  fall_silent("c");
  EXPECT_EQ(decide().reason, "node 1 (b), node 2 (c) are gone: they fell silent");
  die("d");
  say("e", NodePhase::leaving);
  EXPECT_EQ(decide().reason,
            "node 1 (b), node 2 (c), node 3 (d) are gone: 2 of them fell silent; e has words for "
            "it");
}

// spec: L3, L9 a node that has left by the time the next epoch, which has a seat for it, is known
// left by its own words there too; and after the end of training a loss is told as before it
TEST_F(NextEpoch, ItSaysHowANodeWentThatTheNextEpochNames) {
  begin_with_incarnations();
  die("c");
  const Epoch decided = make_epoch(view, decide());
  say("b", NodePhase::leaving);
  die("b");
  view.apply(Update{++revision, false, {}, decided, revision}, now);
  EXPECT_EQ(decide().reason, "b has words for it");
  say_trained("a", decided.number, NodePhase::running);
  EXPECT_TRUE(decide().reason.starts_with("b has words for it; training had ended"))
      << decide().reason;
}

// spec: L2 a host on which the program cannot be started is in trouble each time that a node of it
// comes and leaves again
TEST_F(NextEpoch, AHostWithoutTheProgramIsPassedOver) {
  options.blacklist_after = 1;
  options.blacklist_cooldown = seconds(60);
  begin(3);
  say("a", NodePhase::leaving, 127);
  EXPECT_EQ(commit(), (Slots{{1, "b"}, {2, "c"}}));
  die("a");
  come("a");
  EXPECT_FALSE(decide().commit);
}

// spec: L2 a host in trouble too often is passed over until its time is up
TEST_F(NextEpoch, AHostInTroubleIsPassedOver) {
  options.blacklist_after = 2;
  options.blacklist_cooldown = seconds(60);
  begin(2);
  die("b");
  commit();
  come("b");
  commit();
  die("b");
  commit();
  come("b");
  EXPECT_FALSE(decide().commit);
  const TimePoint again = decide().again;
  EXPECT_EQ(again, now + seconds(60));
  come("c");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "c"}})) << "another host is welcome";
  die("c");
  now = again;
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
}

// A node that has stopped (a signal, a program that cannot be run) ends the job at once.
TEST_F(NextEpoch, AStoppedNodeEndsTheJob) {
  options.max_restarts = 3;
  begin(2);
  say("b", NodePhase::stopped, 143);
  EXPECT_EQ(decide().state, JobState::failed);
  EXPECT_EQ(decide().exit_code, 143);
}

// A hold that ended and began again unseen is another node.
TEST_F(NextEpoch, AnotherHoldOfANameIsAnotherNode) {
  begin(2);
  since.erase("b");
  come("b");
  EXPECT_EQ(view.lost(), std::set<int>{1});
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
}

// spec: L12 a node that has finished is in no later epoch, and its success counts
TEST_F(NextEpoch, AFinishedNodeIsInNoLaterEpoch) {
  options.max_restarts = 9;
  begin(3);
  say("a", NodePhase::finished);
  EXPECT_FALSE(decide().commit);
  EXPECT_TRUE(view.lost().empty());
  say("b", NodePhase::failed, 1);
  EXPECT_EQ(commit(), (Slots{{1, "b"}, {2, "c"}}));
  die("a");
  EXPECT_FALSE(decide().commit);
  say("b", NodePhase::finished);
  come("d");
  EXPECT_FALSE(decide().commit) << "a job that is about to end is not started again";
  say("c", NodePhase::finished);
  EXPECT_EQ(decide().state, JobState::succeeded);
}

// spec: L12 a node that finishes when the next epoch has begun already leaves it
TEST_F(NextEpoch, AFinishedNodeGivesUpTheSeatOfALaterEpoch) {
  options.max_restarts = 9;
  begin(2);
  NodeReport late = view.nodes().at("a").report;
  late.phase = NodePhase::finished;
  late.epoch = view.epoch().number;
  say("b", NodePhase::failed, 1);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  say("a", late);
  EXPECT_EQ(commit(), (Slots{{1, "b"}}));
}

// spec: L12 who has come to an epoch: whatever a node says of it counts once
TEST_F(NextEpoch, CountsWhoHasComeToTheEpoch) {
  options.max_restarts = 9;
  begin(2);
  EXPECT_EQ(view.arrived(), 0u);
  say("a", NodePhase::running);
  EXPECT_EQ(view.arrived(), 1u);
  say("a", NodePhase::failed, 1);
  EXPECT_EQ(view.arrived(), 1u);
  say("b", NodePhase::succeeded);
  EXPECT_EQ(view.arrived(), 2u);
  commit();
  EXPECT_EQ(view.arrived(), 0u);
}

// A snapshot says also who is not there any more.
TEST_F(NextEpoch, ASnapshotTellsWhoIsGone) {
  begin(3);
  Update update{++revision, true, {}, {}, 0};
  for (const std::string name : {"a", "c"})
    update.changes.push_back({name, encode(view.nodes().at(name).report), since[name]});
  view.apply(update, now);
  EXPECT_EQ(view.lost(), std::set<int>{1});
}

// The first proposes: the member with the lowest slot, and before there are members who came first.
TEST_F(NextEpoch, TheFirstProposes) {
  options.max_nodes = 2;
  EXPECT_EQ(view.proposer(), "");
  come("b");
  come("a");
  EXPECT_EQ(view.proposer(), "b");
  commit();
  die("b");
  EXPECT_EQ(view.proposer(), "a");
}

TEST(NodeReport, WhatIsTornIsRefused) {
  const std::string whole = encode(NodeReport{NodePhase::failed, 3, 1, 7, "host", "why", "more"});
  ASSERT_TRUE(decode_report(whole).ok());
  EXPECT_EQ(decode_report(whole)->reason, "why");
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_FALSE(decode_report(whole.substr(0, length)).ok()) << length;
  EXPECT_FALSE(decode_report(whole + "x").ok());
  std::string other_version = whole;
  ++other_version[0];
  EXPECT_FALSE(decode_report(other_version).ok()) << "though it has the right length";
  EXPECT_FALSE(decode_report(whole.substr(1)).ok()) << "of a version that wrote none";
}

TEST(EpochRecord, WhatIsTornIsRefused) {
  const Epoch epoch{4, JobState::running, 1, 0, "why", {{0, "a", "1"}, {2, "b", "2"}}, "launch"};
  const std::string whole = encode(epoch);
  EXPECT_EQ(decode_epoch(whole).value(), epoch);
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_FALSE(decode_epoch(whole.substr(0, length)).ok()) << length;
  EXPECT_FALSE(decode_epoch(whole + "x").ok());
}

}  // namespace
}  // namespace muster::membership
