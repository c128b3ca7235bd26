// SPDX-License-Identifier: BSD-3-Clause
// Which members have the job's state in memory, and what the next epoch owes to that, on a clock
// that stands where the test puts it.
#include "jobs/membership/testing/epoch_rules.h"

namespace muster::membership {
namespace {

using std::chrono::seconds;

/// Node a trains alone and has all commits; b has joined, and its workers have not got them yet.
class StateHolders : public testing::EpochRules {
 protected:
  StateHolders() { options.silence_patience = seconds(60); }
  void begin_with_one_holder() {
    options.min_nodes = 1;
    options.max_nodes = 2;
    say("a", NodeReport{.host = "a", .incarnation = "a"});
    now += options.last_call;
    commit();
    say_state("a", 650);
    say("b", NodeReport{.host = "b", .incarnation = "b"});
    EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  }
  /// The epoch that a decision to go on makes, with the same members.
  Epoch next() const {
    Decision decision;
    decision.commit = true;
    return make_epoch(view, decision);
  }
};

// spec: L14.node the only member with the job's state falls silent: the others wait for as long as
// it keeps its workers, and nothing has happened if it comes back
TEST_F(StateHolders, TheOnlyOneIsWaitedFor) {
  begin_with_one_holder();
  fall_silent("a");
  EXPECT_EQ(view.proposer(), "b");
  Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_EQ(decision.again, now + seconds(60));
  EXPECT_EQ(decision.awaited, std::vector<int>{0});
  EXPECT_EQ(decision.awaited_until, now + seconds(60));
  EXPECT_NE(decision.waits_for.find("node 0 (a) fell silent"), std::string::npos)
      << decision.waits_for;
  EXPECT_FALSE(next_epoch(now, seen_late(), options).commit) << "a node that comes later waits too";
  now += seconds(59);
  EXPECT_FALSE(decide().commit);
  NodeReport back = {.phase = NodePhase::running, .epoch = 2, .host = "a", .incarnation = "a"};
  back.state_in = 1;
  say("a, again", back);
  EXPECT_EQ(view.state_holders(), 1u);
  now += seconds(100);
  decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_TRUE(decision.waits_for.empty());
}

// spec: L14.lost_state the only member with the job's state does not come back: the next epoch says
// so, and knows how many commits were made
TEST_F(StateHolders, ItIsNotWaitedForForEver) {
  begin_with_one_holder();
  fall_silent("a");
  now += seconds(60);
  commit();
  EXPECT_EQ(view.epoch().reason,
            "node 0 (a) is gone: it fell silent; no node that is left has the job's state in "
            "memory");
  EXPECT_EQ(view.epoch().committed, 650);
}

// spec: L14.node no epoch waits for a member that has ended or left, for one without the state, or
// where another one has it
TEST_F(StateHolders, NothingElseIsWaitedFor) {
  begin_with_one_holder();
  const JobView one_holder = view;
  die("a");
  EXPECT_TRUE(decide().commit);
  view = one_holder;
  fall_silent("b");
  EXPECT_TRUE(decide().commit) << "b has nothing";
  view = one_holder;
  say_state("b", 650);
  EXPECT_EQ(view.state_holders(), 2u);
  fall_silent("a");
  EXPECT_TRUE(decide().commit) << "b has it too";
  EXPECT_EQ(decide().reason, "node 0 (a) is gone: it fell silent");
  view = one_holder;
  NodeReport without = view.nodes().at("a").report;
  without.state_in = 0;  // all its workers have ended
  say("a", without);
  fall_silent("a");
  EXPECT_TRUE(decide().commit);
  view = one_holder;
  say("a", NodePhase::leaving);
  EXPECT_TRUE(decide().commit);
}

// spec: L14.node, L14.end where no member has the state any more, one that fell silent is waited
// for if its launcher keeps a commit of earlier workers, unless one that is there keeps one as new
TEST_F(StateHolders, ALauncherThatKeepsACommitIsWaitedFor) {
  begin_with_one_holder();
  const auto keeps = [&](const std::string& name, const std::string& incarnation,
                         std::int64_t kept_in) {
    NodeReport report{.host = incarnation, .incarnation = incarnation};
    report.kept_in = kept_in;
    say(name, report);
  };
  keeps("b", "b", 2);
  const JobView both = view;
  const auto since_both = since;
  fall_silent("b");
  EXPECT_TRUE(decide().commit) << "a has the state";
  view = both;
  die("a");
  fall_silent("b");
  say("c", NodeReport{.host = "c", .incarnation = "c"});
  Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_EQ(decision.awaited, std::vector<int>{1});
  keeps("b, again", "b", 2);
  decision = decide();
  EXPECT_TRUE(decision.commit);
  EXPECT_TRUE(decision.awaited.empty());

  // With a third member, whose launcher keeps an older commit, one as new, or none.
  for (const std::int64_t other : {1, 2, 0}) {
    view = both;
    since = since_both;
    options.max_nodes = 3;
    say("c", NodeReport{.host = "c", .incarnation = "c"});
    commit();
    keeps("b", "b", 2);
    keeps("c", "c", other);
    die("a");
    fall_silent("b");
    EXPECT_EQ(decide().commit, other == 2) << other;
  }
}

// spec: L14.node a node that trained alone and fell silent before it could tell of a commit is
// waited for, by a node that had come before, and by one that has joined since
TEST_F(StateHolders, ACommitThatCouldNotBeToldOfIsWaitedFor) {
  options.keeps_state = true;
  options.max_nodes = 2;
  say("a", NodeReport{.host = "a", .incarnation = "a"});
  now += options.last_call;
  commit();
  const JobView alone = view;
  const auto since_alone = since;
  const auto again = [&] {
    view = alone;
    since = since_alone;
  };
  say("b", NodeReport{.host = "b", .incarnation = "b"});
  fall_silent("a");
  Decision decision = decide();
  EXPECT_FALSE(decision.commit);
  EXPECT_EQ(decision.awaited, std::vector<int>{0});
  now += seconds(60);
  EXPECT_TRUE(decide().commit) << "not for ever";

  again();
  say_state("a", 5);
  NodeReport none = view.nodes().at("a").report;
  none.state_in = 0;  // all its workers have ended
  say("a", none);
  say("b", NodeReport{.host = "b", .incarnation = "b"});
  fall_silent("a");
  EXPECT_TRUE(decide().commit);

  again();
  say("b", NodeReport{.host = "b", .incarnation = "b"});
  die("a");
  EXPECT_TRUE(decide().commit) << "its workers died with it";

  again();
  view.hear_own_state(1, false);
  say("b", NodeReport{.host = "b", .incarnation = "b"});
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  fall_silent("a");
  EXPECT_FALSE(decide().commit) << "the record says that a had the state";
}

// spec: L14.node what a node said before it lost its seat is of workers that it has no more
TEST_F(StateHolders, AStateOfEarlierWorkersIsNone) {
  begin_with_one_holder();
  say_state("b", 650);
  die("a");
  commit();
  NodeReport late = {.host = "a", .incarnation = "a"};
  late.state_in = 2;
  say("a", late);
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {1, "b"}}));
  EXPECT_EQ(view.epoch().number, 4);
  EXPECT_EQ(view.state_holders(), 1u);
  fall_silent("b");
  EXPECT_FALSE(decide().commit);
}

// spec: L14.node, L7 where each node has a part and a copy of its neighbour's, one may be lost, and
// two that may come back are waited for; once one has gone and nothing is committed since, so is
// one
TEST_F(StateHolders, OfADividedStateOneMayBeLost) {
  begin_with_incarnations();
  const auto say_parts = [&](const std::string& name, std::int64_t epoch) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = epoch;
    report.state_divided = true;
    say(name, report);
  };
  const auto come_back_with_parts = [&](const std::string& name, const std::string& incarnation) {
    NodeReport report{
        .epoch = view.epoch().number, .host = incarnation, .incarnation = incarnation};
    report.phase = NodePhase::running;
    report.state_in = 1;
    report.state_divided = true;
    say(name, report);
  };
  for (const char* name : {"a", "b", "c"}) say_parts(name, 1);
  const JobView all_have_parts = view;
  fall_silent("b");
  EXPECT_TRUE(decide().commit) << "its neighbour has a copy";
  fall_silent("c");
  EXPECT_FALSE(decide().commit);
  const std::string why = decide().waits_for;
  EXPECT_TRUE(why.starts_with("node 1 (b), node 2 (c) fell silent, and the nodes that are left"))
      << why;
  come_back_with_parts("b'", "b");
  EXPECT_TRUE(decide().commit);

  view = all_have_parts;
  say("b", NodePhase::failed, 1);  // one of its workers: the same nodes go on, and none is gone
  options.max_restarts = 9;
  EXPECT_EQ(commit().size(), 3u);
  fall_silent("c");
  EXPECT_TRUE(decide().commit) << "before the first commit too, as nobody has gone since the last";

  view = all_have_parts;
  die("b");
  EXPECT_EQ(commit(), (Slots{{0, "a"}, {2, "c"}}));
  fall_silent("c");
  EXPECT_FALSE(decide().commit) << "the copy of b's part is on c alone";
  come_back_with_parts("c'", "c");
  say_parts("a", 2);  // the first node speaks for all
  fall_silent("c'");
  EXPECT_TRUE(decide().commit);
}

// spec: L14.node a node that comes when all members have fallen silent does not know what they had,
// and waits for them
TEST_F(StateHolders, WhoHasHeardOfNobodyWaits) {
  options.keeps_state = true;
  options.max_nodes = 2;
  begin(2);
  say_state("a", 5);
  fall_silent("a");
  fall_silent("b");
  come("c");
  const JobView late = seen_late();
  EXPECT_EQ(late.proposer(), "c");
  EXPECT_FALSE(next_epoch(now, late, options).commit);
  EXPECT_TRUE(next_epoch(now + seconds(60), late, options).commit);
}

// spec: L7, L14.node a commit of a divided state leaves a part with each member: one that has not
// said so yet is waited for like the others
TEST_F(StateHolders, AMemberThatHasNotSpokenYetHasAPart) {
  begin_with_incarnations();
  for (const char* name : {"a", "b"}) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = 1;
    report.state_divided = true;
    say(name, report);
  }
  EXPECT_EQ(view.state_holders(), 3u);
  fall_silent("c");
  EXPECT_TRUE(decide().commit) << "its neighbour has a copy";
  fall_silent("b");
  EXPECT_FALSE(decide().commit) << "and c may have the only other one";
}

// spec: L7, L14.node a part that a member has not told of stays with it from epoch to epoch, also
// for a node that comes later
TEST_F(StateHolders, APartThatWasNotToldOfStays) {
  options.max_restarts = 10;
  begin_with_incarnations();
  NodeReport report = view.nodes().at("a").report;
  report.state_in = 1;
  report.state_divided = true;
  say("a", report);
  say("a", NodePhase::failed);
  commit();
  EXPECT_EQ(view.state_holders(), 3u);
  EXPECT_EQ(seen_late().state_holders(), 3u);
  fall_silent("c");
  commit();
  EXPECT_EQ(view.epoch().parts_gone, 1);
  fall_silent("b");
  EXPECT_FALSE(decide().commit) << "it has the copy of c's part";
}

// spec: L7, L14.node a member that has told that its part is gone has none in the next epochs
// either, also for a node that comes later, and then none of the others may be lost
TEST_F(StateHolders, APartThatIsGoneDoesNotComeBack) {
  options.max_restarts = 10;
  begin_with_incarnations();
  NodeReport report;
  for (const char* name : {"a", "b", "c"}) {
    report = view.nodes().at(name).report;
    report.state_in = 1;
    report.state_divided = true;
    say(name, report);
  }
  report = view.nodes().at("b").report;
  report.state_in = 0;
  report.none_in = 1;
  say("b", report);
  EXPECT_EQ(view.state_holders(), 2u);
  EXPECT_EQ(seen_late().state_holders(), 2u);
  say("b", NodePhase::failed);
  commit();
  EXPECT_EQ(view.state_holders(), 2u);
  EXPECT_EQ(seen_late().state_holders(), 2u);
  EXPECT_EQ(view.epoch().parts_gone, 1);
  fall_silent("c");
  EXPECT_FALSE(decide().commit) << "it has the copy of b's part";
}

// spec: L7, L14.node a node that comes when only members are left that have not told of their parts
// counts them
TEST_F(StateHolders, WhoComesLaterCountsPartsThatWereNotToldOf) {
  begin_with_incarnations();
  NodeReport report = view.nodes().at("a").report;
  report.state_in = 1;
  report.state_divided = true;
  say("a", report);
  die("a");
  commit();
  EXPECT_EQ(view.epoch().parts_gone, 1);
  JobView late = seen_late();
  EXPECT_EQ(late.state_holders(), 2u);
  EXPECT_FALSE(late.may_lose_a_part());
}

// spec: L7, L14.node a commit that the viewing node's own workers have made counts though no member
// has told of it
TEST_F(StateHolders, TheOwnWorkersKnowOfACommit) {
  begin_with_incarnations();
  view.hear_own_state(2, true);
  EXPECT_EQ(view.state_holders(), 0u) << "of another epoch";
  view.hear_own_state(1, true);
  EXPECT_EQ(view.state_holders(), 3u);
  fall_silent("b");
  fall_silent("c");
  EXPECT_FALSE(decide().commit);
}

// spec: L3, L14.node a node that is seen to die while the next epoch is on its way is not waited
// for as one that fell silent; one that fell silent then is, if it has what the others lack
TEST_F(StateHolders, ADeathDuringADecisionIsADeath) {
  begin_with_incarnations();
  for (const char* name : {"a", "b", "c"}) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = 1;
    report.state_divided = true;
    say(name, report);
  }
  die("b");
  Epoch decided = make_epoch(view, decide());
  const auto adopt = [&] { view.apply(Update{++revision, false, {}, decided, revision}, now); };
  const JobView before = view;
  die("c");
  adopt();
  EXPECT_EQ(view.lost(), std::set<int>{2});
  EXPECT_TRUE(decide().commit);
  view = before;
  fall_silent("c");
  adopt();
  EXPECT_FALSE(decide().commit) << "the copy of b's part is on c alone";
  view = before;
  say("c'", view.nodes().at("c").report);  // while its earlier hold lives
  die("c");
  fall_silent("c'");
  adopt();
  EXPECT_FALSE(decide().commit) << "the end of the earlier hold was nobody's death";
}

// spec: L3, L14.lost_state a node that has seen the job from its beginning knows that a member that
// goes before the first commit takes nothing with it
TEST_F(StateHolders, BeforeTheFirstCommitThereIsNothingToWaitFor) {
  options.keeps_state = true;
  options.max_nodes = 2;
  for (const bool silent : {false, true}) {
    view = {};
    since.clear();
    for (const char* name : {"a", "b"}) say(name, NodeReport{.host = name, .incarnation = name});
    const Epoch decided = make_epoch(view, decide());
    end("b", silent);
    view.apply(Update{++revision, false, {}, decided, revision}, now);
    EXPECT_TRUE(decide().commit);
    EXPECT_EQ(decide().reason,
              std::string("node 1 (b) is gone") + (silent ? ": it fell silent" : ""));
  }
}

// spec: L14.lost_state a job without commits has no state to wait for
TEST_F(StateHolders, WithoutCommitsNothingWaits) {
  options.max_nodes = 2;
  begin(2);
  fall_silent("a");
  EXPECT_TRUE(decide().commit);
  EXPECT_EQ(make_epoch(view, decide()).committed, 0);
}

// spec: L14.lost_state every epoch knows the newest commit that was told of, and none of before a
// loss
TEST_F(StateHolders, TheRecordKnowsTheCommits) {
  begin_with_one_holder();
  EXPECT_EQ(view.epoch().committed, 650);
  say_state("b", 700);
  const JobView told = view;
  die("a");
  commit();
  EXPECT_EQ(view.epoch().committed, 700);
  die("b");
  say("c", NodeReport{.host = "c", .incarnation = "c"});
  commit();
  EXPECT_EQ(view.epoch().committed, 700) << "c has never heard of b";
  NodeReport lost = view.nodes().at("c").report;
  lost.lost_in = view.epoch().number;
  say("c", lost);
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  const JobView began_again = view;
  commit();
  EXPECT_EQ(view.epoch().committed, 0);
  view = began_again;
  say_state("c", 5);
  commit();
  EXPECT_EQ(view.epoch().committed, 5);
}

// spec: L14.lost_state every epoch knows the newest one in which a node had the state, or in which
// one that nobody has heard of may have had it
TEST_F(StateHolders, TheRecordKnowsWhereTheStateWas) {
  begin_with_one_holder();
  EXPECT_EQ(view.epoch().state_in, 1);
  const JobView before = view;
  say_state("a", 700);
  die("a");
  commit();
  EXPECT_EQ(view.epoch().state_in, 2);
  EXPECT_EQ(view.epoch().committed, 700);
  view = before;
  die("a");
  commit();
  EXPECT_EQ(view.epoch().state_in, 1);
  view = before;
  since.erase("a");
  since.erase("b");
  JobView late;  // which has seen neither
  late.apply(Update{++revision, true, {}, before.epoch(), revision}, now);
  view = late;
  now += seconds(60);
  say("c", NodeReport{.host = "c", .incarnation = "c"});
  commit();
  EXPECT_EQ(view.epoch().state_in, 2);
}

// spec: L14.lost_state a loss that is told of after the next epoch was decided is known in that
// one, to nodes that come later too, and the commits of before it are none any more
TEST_F(StateHolders, ALossThatIsHeardOfLateIsKnown) {
  begin_with_one_holder();
  say_state("b", 700);
  say("c", NodeReport{.host = "c", .incarnation = "c"});
  options.max_nodes = 3;
  commit();
  const std::int64_t present = view.epoch().number;
  EXPECT_EQ(view.epoch().committed, 700);
  NodeReport lost = view.nodes().at("b").report;
  lost.lost_in = present - 1;
  lost.state_in = lost.committed = 0;
  say("b", lost);
  say("d", NodeReport{.host = "d", .incarnation = "d"});
  options.max_nodes = 4;
  const JobView before = view;
  commit();
  EXPECT_EQ(view.epoch().committed, 0);
  EXPECT_EQ(view.epoch().lost_in, present - 1);
  EXPECT_EQ(seen_late().lost_in(), present - 1);
  EXPECT_EQ(next().committed, 0) << "a's 650 are of before";

  // Heard of by this node alone: the epoch that another one decides does not take it back.
  Epoch unaware = before.epoch();
  ++unaware.number;
  unaware.committed = 700;
  view = before;
  view.apply(Update{++revision, false, {}, unaware, revision}, now);
  EXPECT_EQ(next().committed, 0);
  NodeReport again = view.nodes().at("b").report;
  again.state_in = unaware.number;
  again.committed = 5;
  say("b", again);
  EXPECT_EQ(next().committed, 5);
}

// spec: L14.lost_state commits of which a node tells that has joined again, and has not got the
// state since, are those of workers that have ended
TEST_F(StateHolders, CommitsOfEarlierWorkersDoNotCount) {
  begin_with_one_holder();
  NodeReport old = view.nodes().at("b").report;
  old.committed = 5000;
  say("b", old);
  EXPECT_EQ(next().committed, 650);
  say_state("b", 651);
  NodeReport ended = view.nodes().at("b").report;  // its worker, which made commit 660 before
  ended.state_in = 0;
  ended.committed = 660;
  say("b", ended);
  EXPECT_EQ(next().committed, 660);
}

// spec: L2 a host's troubles stand in the epoch, so a node that came later passes it
// over as well; what counts no more is dropped
TEST_F(StateHolders, WhoComesLaterKnowsTheHostsInTrouble) {
  options.blacklist_after = 2;
  options.blacklist_cooldown = seconds(100);
  options.max_nodes = 2;
  begin(2);
  for (int i = 0; i < 2; ++i) {
    die("b");
    commit();
    come("b");
    if (i == 0) commit();
    now += seconds(20);
  }
  EXPECT_FALSE(decide().commit) << "b is passed over";
  ASSERT_EQ(view.epoch().troubles.size(), 2u);
  EXPECT_EQ(view.epoch().troubles.back().host, "b");
  const JobView late = seen_late();
  const Decision decision = next_epoch(now, late, options);
  EXPECT_FALSE(decision.commit);
  EXPECT_GE(decision.again, decide().again) << "never before its time";
  now += seconds(100);
  commit();
  EXPECT_TRUE(view.epoch().troubles.empty()) << "a failure so long ago counts no more";
}

// spec: L2 a node that was cut off while a host was in trouble again counts that beside what it
// knew of the host before; what all have seen counts once
TEST_F(StateHolders, TroublesOfAHostAreCountedByTheirTimes) {
  options.blacklist_after = 2;
  options.blacklist_cooldown = seconds(100);
  begin_with_incarnations();
  die("b");
  commit();
  const auto count = [this] { return view.troubles_of("b")->size(); };
  EXPECT_EQ(count(), 1u);
  Epoch epoch = view.epoch();
  const auto hear_of = [&](std::vector<RecordedTrouble> troubles) {
    ++epoch.number;
    epoch.troubles = std::move(troubles);
    view.apply(Update{++revision, false, {}, epoch, revision}, now);
  };
  now += seconds(2);
  hear_of({{"b", seconds(1)}});  // the record took a second to come
  EXPECT_EQ(count(), 1u);
  now += seconds(58);
  hear_of({{"b", seconds(5)}});
  EXPECT_EQ(count(), 2u) << "the others have seen another one";
  hear_of({{"b", seconds(60)}, {"b", seconds(5)}});
  EXPECT_EQ(count(), 2u);
  hear_of({{"b", seconds(30)}});
  EXPECT_EQ(count(), 3u);
  EXPECT_TRUE(std::ranges::is_sorted(*view.troubles_of("b")));
  now += seconds(30);
  die("c");  // which this node reads late, with the epoch that others have made meanwhile
  hear_of({{"c", seconds(2)}});
  EXPECT_EQ(view.troubles_of("c")->size(), 1u);
}

}  // namespace
}  // namespace muster::membership
