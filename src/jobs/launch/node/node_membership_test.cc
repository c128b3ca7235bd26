// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/node_membership.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "core/store/factory.h"
#include "jobs/launch/testing/node_of_service.h"
#include "jobs/membership/factory.h"
#include "testing/limits.h"

namespace muster::launch {
namespace {

std::unique_ptr<membership::Membership> member_of(std::shared_ptr<store::TcpStore> store) {
  auto made = membership::make_agent_membership(
      std::move(store), "job", muster::testing::kMustHappen, muster::testing::kMustHappen);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(*made);
}

std::shared_ptr<store::TcpStore> served_store() {
  store::TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = 0;
  options.is_server = true;
  options.secret = Secret::random();
  auto store = store::make_tcp_store(options);
  EXPECT_TRUE(store.ok()) << store.status().message();
  return std::move(*store);
}

// spec: L12 an epoch is complete once its nodes have come to it; a node that has finished, the last
// one, still ends the job
TEST(NodeMembership, TellsOfACompleteEpochAndEndsTheJobAlone) {
  NodeMembershipOptions here;
  here.name = "node/0";
  const NodeDetails details{NodeFacts{1, "default", "a host", 0}, "a launcher", "a host", 1};
  auto node = NodeMembership::join(member_of(served_store()), here, details);
  ASSERT_TRUE(node.ok()) << node.status().message();
  const auto has_event = [](const NodeNotice& notice) { return notice.event.has_value(); };
  const NodeNotice begun = next_notice(**node, has_event);
  ASSERT_TRUE(begun.plan);
  EXPECT_EQ(begun.plan->node, 0);
  (*node)->report(membership::NodePhase::running, 1, 0, {});
  EXPECT_EQ(
      next_notice(**node, [](const NodeNotice& notice) { return notice.complete > 0; }).complete,
      1);

  (*node)->report(membership::NodePhase::finished, 1, 0, {});
  (*node)->report(membership::NodePhase::stopped, 0, 0, "words");
  const NodeNotice over = next_notice(**node, has_event);
  ASSERT_TRUE(over.event && std::holds_alternative<JobEnded>(*over.event));
  EXPECT_EQ(std::get<JobEnded>(*over.event).reason, "words");
  EXPECT_EQ(std::get<JobEnded>(*over.event).exit_code, 0);
  EXPECT_FALSE(over.service_lost);
}

// spec: L1 an epoch with another number of workers on this node than it starts ends the job there
TEST(NodeMembership, RefusesAnEpochOfOtherWorkers) {
  const auto store = served_store();
  NodeMembershipOptions here;
  here.name = "node/0";
  here.epochs.min_nodes = here.epochs.max_nodes = 2;  // alone it makes no epoch
  NodeDetails details{NodeFacts{6, "default", "a host", 0}, "a launcher", "a host", 1};
  auto node = NodeMembership::join(member_of(store), here, details);
  ASSERT_TRUE(node.ok()) << node.status().message();

  details.facts.workers = 1;
  membership::NodeReport report;
  report.details = encode(details);
  membership::Epoch epoch{1, membership::JobState::running, 0, 0, "a test", {}};
  epoch.members.push_back({0, here.name, encode(report)});
  const auto committed = member_of(store)->commit(epoch, 0);
  ASSERT_TRUE(committed.ok()) << committed.status().message();
  std::vector<NodeNotice> notice;
  pollfd ready{(*node)->descriptor(), POLLIN, 0};
  while (notice.empty() && ::poll(&ready, 1, muster::testing::kMustHappenMs) == 1)
    notice = (*node)->take();
  ASSERT_FALSE(notice.empty());
  ASSERT_TRUE(notice.front().event.has_value());
  const auto* end = std::get_if<JobEnded>(&*notice.front().event);
  ASSERT_NE(end, nullptr);
  EXPECT_FALSE(end->succeeded);
  EXPECT_NE(end->reason.find("has 1 workers on this node, which starts 6"), std::string::npos)
      << end->reason;
}

// spec: L14 a report is told until it is confirmed, and an epoch is proposed until it is answered
TEST_F(NodeOfService, WhatIsToldIsToldUntilItIsConfirmed) {
  service.failures = 0;
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  {
    const Service::Lock lock(service.mutex);
    service.failures = 5;
  }
  node->report(membership::NodePhase::failed, 1, 3, "words");
  // The failure uses up the last restart, so an epoch says that the job has failed.
  const NodeNotice over = next_event(*node);
  ASSERT_TRUE(over.event && std::holds_alternative<JobEnded>(*over.event));
  EXPECT_EQ(std::get<JobEnded>(*over.event).reason, "words");
  EXPECT_EQ(service.failures, 0);
  EXPECT_EQ(service.reports.back().reason, "words");
  EXPECT_TRUE(node->all_confirmed());
}

// spec: L14.service a thread that reports never waits for the service, and the workers of a node
// without a lease end after their time while requests hang
TEST_F(NodeOfService, NothingWaitsForAServiceThatHangs) {
  out_limit = std::chrono::milliseconds(50);
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  service.hang();
  const int before = service.requests;
  node->report(membership::NodePhase::failed, 1, 3, "words");
  node->set_program_port(7);
  service.until([&] { return service.requests > before; });
  EXPECT_FALSE(node->all_confirmed());
  {
    const Service::Lock lock(service.mutex);
    service.lost = true;
  }
  EXPECT_TRUE(has_epoch(next_event(*node), 1, false)) << "while the service hangs";
  node->report(membership::NodePhase::failed, 1, 3, "more words");
  service.answer();
}

// spec: L14.node a node that lost its place takes another name, as the service may still know the
// hold that was its own, and has its seat again with the workers that it had
TEST_F(NodeOfService, ALostLeaseEndsNoWorkers) {
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  node->report(membership::NodePhase::running, 1, 0, {});
  {
    const Service::Lock lock(service.mutex);
    service.lost = true;
    service.failures = 3;
  }
  service.until([&] { return service.names.size() == 2; });
  EXPECT_NE(service.names[0], service.names[1]);
  membership::Update update;
  update.changes.push_back({service.names[0], std::nullopt, 0});
  service.tell(update);
  {
    const Service::Lock lock(service.mutex);
    EXPECT_EQ(service.reports.back().phase, membership::NodePhase::running);
    EXPECT_EQ(service.reports.back().incarnation, service.reports.front().incarnation);
    EXPECT_EQ(service.epochs.size(), 1u);
  }
  expect_that_nothing_has_happened(*node);
}

// spec: L14.service a service that is silent for longer than the lease and then answers has changed
// nothing: the hold is the same
TEST_F(NodeOfService, ASilentServiceEndsNoWorkers) {
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  {
    const Service::Lock lock(service.mutex);
    service.silent = true;
  }
  node->report(membership::NodePhase::running, 1, 0, {});
  service.until([&] { return service.reports.size() == 2; });
  {
    const Service::Lock lock(service.mutex);
    service.silent = false;
    EXPECT_EQ(service.names.size(), 1u);
  }
  expect_that_nothing_has_happened(*node);
}

// spec: L15 a node tells the others whom its workers blame, those of one epoch together, and an
// epoch of the same members follows
TEST_F(NodeOfService, TroubleMakesAnEpochOfTheSameMembers) {
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  node->report_trouble(1, {0}, "rank 1 stands still", 3);
  node->report_trouble(1, {0, 4}, "rank 5 stands still", 4);
  const NodeNotice next = next_event(*node);
  EXPECT_TRUE(has_epoch(next, 2, true));
  ASSERT_TRUE(next.plan);
  EXPECT_EQ(next.plan->epoch.restarts, 0);
  EXPECT_FALSE(std::get<NewEpoch>(*next.event).only_joined);
  const Service::Lock lock(service.mutex);
  EXPECT_EQ(service.reports.back().troubled_in, 1);
  EXPECT_EQ(service.reports.back().committed, 4);
  EXPECT_EQ(service.reports.back().blamed, (std::vector<std::int32_t>{0, 4}));
  EXPECT_EQ(service.reports.back().trouble, "rank 1 stands still");
}

// spec: L14.end an epoch that leaves a node out ends its workers, and the node wants others: it has
// the job's state no more
TEST_F(NodeOfService, AnEpochWithoutItEndsItsWorkers) {
  const auto node = join();
  const NodeNotice first = next_event(*node);
  ASSERT_TRUE(first.plan);
  node->report(membership::NodePhase::running, 1, 0, {});
  node->note_state({.epoch = 1, .committed = 650});
  node->note_state({.epoch = 1, .committed = 660});  // no news to others
  service.until([&] { return service.reports.size() == 3; });
  {
    const Service::Lock lock(service.mutex);
    EXPECT_EQ(service.reports.back().state_in, 1);
    EXPECT_EQ(service.reports.back().committed, 650);
  }
  service.hang();
  membership::Update update;
  update.epoch = first.plan->epoch;
  update.epoch->number = update.epoch_revision = 2;
  membership::NodeReport other = *membership::decode_report(update.epoch->members[0].value);
  other.incarnation = "another";
  update.epoch->members[0].name = "node/b";
  update.epoch->members[0].value = membership::encode(other);
  service.tell(update);
  EXPECT_TRUE(has_epoch(next_event(*node), 2, false));
  service.answer();
  service.until([&] { return service.reports.size() >= 4; });
  const Service::Lock lock(service.mutex);
  ASSERT_EQ(service.reports.size(), 4u) << "commit 660 was told, which is no news";
  EXPECT_EQ(service.reports.back().phase, membership::NodePhase::waiting);
  EXPECT_EQ(service.reports.back().state_in, 0);
}

// spec: L14.end a node whose launcher keeps a commit of workers that an epoch left out says so
TEST_F(NodeOfService, AKeptCommitIsTold) {
  const auto node = join();
  ASSERT_TRUE(next_event(*node).plan);
  node->note_state({.kept_in = 1});
  node->note_state({.kept_in = 1});
  node->note_state({.epoch = 2, .committed = 1});
  service.until([&] { return service.reports.size() == 3; });
  const Service::Lock lock(service.mutex);
  EXPECT_EQ(service.reports[1].kept_in, 1);
  EXPECT_EQ(service.reports[2].kept_in, 0);
}

// spec: L7, L14.node a node whose workers had the state and have ended with it says of which epoch
// they were, until its next workers have it; where all ranks have lost it that is told by itself
TEST_F(NodeOfService, AStateThatIsGoneIsTold) {
  const auto node = join();
  ASSERT_TRUE(next_event(*node).plan);
  node->note_state({.epoch = 1, .committed = 1, .running = 1});
  node->note_state({.committed = 1, .running = 1});
  node->note_state({.epoch = 2, .committed = 1, .running = 2});
  node->note_state({.lost_in = 3, .running = 3});
  service.until([&] { return service.reports.size() == 5; });
  const Service::Lock lock(service.mutex);
  EXPECT_EQ(service.reports[2].none_in, 1);
  EXPECT_EQ(service.reports[3].none_in, 0);
  EXPECT_EQ(service.reports[4].none_in, 0);
}

// spec: L7, L14.node a node of which one of several workers has ended with its part says so beside
// the others' state, until its workers have a newer one
TEST_F(NodeOfService, APartThatIsGoneIsTold) {
  const auto node = join();
  ASSERT_TRUE(next_event(*node).plan);
  StateNote note{.epoch = 1, .divided = true, .committed = 1, .running = 1};
  node->note_state(note);
  note.gone_in = 1;
  node->note_state(note);
  node->note_state(note);  // no news
  note.gone_in = 0;
  note.epoch = note.running = 2;
  node->note_state(note);
  service.until([&] { return service.reports.size() == 4; });
  const Service::Lock lock(service.mutex);
  EXPECT_EQ(service.reports[2].none_in, 1);
  EXPECT_EQ(service.reports[2].state_in, 1);
  EXPECT_EQ(service.reports[3].none_in, 0);
  EXPECT_EQ(service.reports[3].state_in, 2);
}

// spec: L14.node a state that is divided only after its first commit is told of again
TEST_F(NodeOfService, AStateThatIsDividedLaterIsTold) {
  const auto node = join();
  ASSERT_TRUE(next_event(*node).plan);
  node->note_state({.epoch = 1, .committed = 1});
  node->note_state({.epoch = 1, .divided = true, .committed = 2});
  service.until([&] { return service.reports.size() == 3; });
  const Service::Lock lock(service.mutex);
  EXPECT_TRUE(service.reports.back().state_divided);
  EXPECT_EQ(service.reports.back().committed, 2);
}

// spec: L14.lost_state the first node says in every epoch that it has the state: a node that
// joins later knows by it that commits may have been made
TEST_F(NodeOfService, TheFirstNodeSaysInEachEpochThatItHasTheState) {
  const auto node = join();
  const NodeNotice first = next_event(*node);
  ASSERT_TRUE(first.plan);
  node->note_state({.epoch = 1, .committed = 1});
  membership::Update update;
  update.epoch = first.plan->epoch;
  update.epoch->number = update.epoch_revision = 2;
  service.tell(update);
  EXPECT_TRUE(has_epoch(next_event(*node), 2, true));
  node->note_state({.epoch = 2, .committed = 650});
  service.until([&] { return service.reports.size() == 3; });
  const Service::Lock lock(service.mutex);
  EXPECT_EQ(service.reports.back().state_in, 2);
  EXPECT_EQ(service.reports.back().committed, 650);
}

// spec: L14.node every node says for whom the job stands still and for how long, also one that
// decides nothing, once no other node has come within the time for a repair, and says it once
TEST_F(NodeOfService, EachNodeSaysWhomTheJobWaitsFor) {
  silence_patience = muster::testing::kMustHappen;
  repair_timeout = std::chrono::milliseconds(50);
  const auto node = join();
  const NodeNotice first = next_event(*node);
  ASSERT_TRUE(first.plan);
  membership::Update update;
  update.epoch = first.plan->epoch;
  update.epoch->number = update.epoch_revision = 2;
  membership::Member own = update.epoch->members[0];
  membership::NodeReport other = *membership::decode_report(own.value);
  other.incarnation = "decides";
  const membership::Member decides{0, "node/d", membership::encode(other), 2};
  other.incarnation = "silent";
  other.state_in = 1;
  const membership::Member silent{1, "node/s", membership::encode(other), 1};
  own.slot = 2;
  update.epoch->members = {decides, silent, own};
  update.changes.push_back({decides.name, decides.value, 100});
  service.tell(update);
  const auto waits = [](const NodeNotice& notice) { return notice.waits_for_state.has_value(); };
  NodeNotice notice = next_notice(*node, waits);
  ASSERT_TRUE(notice.waits_for_state);
  EXPECT_EQ(notice.waits_for_state->epoch, 2);
  EXPECT_EQ(notice.waits_for_state->slots, std::vector<int>{1});
  EXPECT_LE(notice.waits_for_state->at_most, silence_patience);
  EXPECT_GT(notice.waits_for_state->at_most, Duration(0));
  EXPECT_NE(notice.waits_for_state->text.find("node 1 (a host) fell silent"), std::string::npos)
      << notice.waits_for_state->text;

  // The next news is of the next epoch, which loses another node too.
  other.incarnation = "silent as well";
  ++update.epoch->number;
  ++update.epoch_revision;
  update.epoch->members.push_back({3, "node/t", membership::encode(other), 1});
  service.tell(update);
  notice = next_notice(*node, waits);
  ASSERT_TRUE(notice.waits_for_state);
  EXPECT_EQ(notice.waits_for_state->epoch, 3);
  EXPECT_EQ(notice.waits_for_state->slots, (std::vector<int>{1, 3}));
}

// spec: L14.service after its time without a word of the service a node ends its workers, and comes
// back as another one
TEST_F(NodeOfService, AServiceThatStaysAwayEndsTheWorkers) {
  out_limit = std::chrono::milliseconds(50);
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  {
    const Service::Lock lock(service.mutex);
    service.silent = true;
  }
  EXPECT_TRUE(has_epoch(next_event(*node), 1, false));
  service.until([&] { return service.names.size() == 2; });
  const Service::Lock lock(service.mutex);
  EXPECT_NE(service.reports.back().incarnation, service.reports.front().incarnation);
  EXPECT_EQ(service.reports.back().phase, membership::NodePhase::waiting);
}

// spec: L14.service a node that has trained to the end keeps its last word through an outage
TEST_F(NodeOfService, AnOutageTakesNoSuccessBack) {
  out_limit = std::chrono::milliseconds(50);
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
  service.hang();
  node->report(membership::NodePhase::running, 1, 0, {}, false, 1);
  {
    const Service::Lock lock(service.mutex);
    service.silent = true;
  }
  // Longer than the limit: the next event is the end of the job, not the end of the workers.
  service.late = 2 * out_limit;
  node->report(membership::NodePhase::succeeded, 1, 0, {}, false, 1);
  {
    const Service::Lock lock(service.mutex);
    service.silent = false;
  }
  service.answer();
  const NodeNotice over = next_event(*node);
  ASSERT_TRUE(over.event && std::holds_alternative<JobEnded>(*over.event));
  EXPECT_TRUE(std::get<JobEnded>(*over.event).succeeded);
}

// spec: L14.end a node that missed the epoch without it, and has a seat in the one after, ends its
// workers first
TEST_F(NodeOfService, AMissedEpochWithoutItEndsItsWorkers) {
  const auto node = join();
  const NodeNotice first = next_event(*node);
  ASSERT_TRUE(first.plan);
  service.hang();
  membership::Update update;
  update.epoch = first.plan->epoch;
  update.epoch->number = update.epoch_revision = 3;
  update.epoch->members[0].joined = 3;
  service.tell(update);
  std::vector<NodeNotice> events;
  pollfd ready{node->descriptor(), POLLIN, 0};
  while (events.size() < 2 && ::poll(&ready, 1, muster::testing::kMustHappenMs) == 1)
    for (NodeNotice& notice : node->take())
      if (notice.event) events.push_back(std::move(notice));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(has_epoch(events[0], 3, false));
  EXPECT_TRUE(has_epoch(events[1], 3, true));
  service.answer();
}

// spec: L14.node a node that is late at every look decides nevertheless
TEST_F(NodeOfService, ANodeThatIsAlwaysLateStillDecides) {
  service.late = std::chrono::milliseconds(600);
  const auto node = join();
  EXPECT_TRUE(has_epoch(next_event(*node), 1, true));
}

// spec: L6 the notice of an epoch says whether it only has more nodes than the one before
TEST_F(NodeOfService, AnEpochThatOnlyHasMoreNodesIsToldApart) {
  const auto node = join();
  const NodeNotice first = next_event(*node);
  ASSERT_TRUE(first.plan);
  service.hang();  // what this node decides itself would come between the epochs that it is told
  membership::Epoch epoch = first.plan->epoch;
  const auto next = [&](std::int64_t number) {
    epoch.number = number;
    membership::Update update;
    update.epoch = epoch;
    update.epoch_revision = number;
    service.tell(std::move(update));
    const NodeNotice notice = next_event(*node);
    EXPECT_TRUE(has_epoch(notice, number, true));
    return std::get<NewEpoch>(*notice.event).only_joined;
  };
  membership::NodeReport other = *membership::decode_report(epoch.members[0].value);
  other.incarnation = "another";
  epoch.members.push_back({1, "node/b", membership::encode(other), 2});
  EXPECT_TRUE(next(2));
  epoch.restarts = 1;
  EXPECT_FALSE(next(3));
  epoch.members.pop_back();
  EXPECT_FALSE(next(4));
  service.answer();
}

// spec: L16.arguments launchers of one job with different --nnodes: the later one is refused by
// name, and the first one is not disturbed
TEST(NodeMembership, RefusesItselfWithOtherNumbersOfNodes) {
  const auto store = served_store();
  NodeMembershipOptions first;
  first.name = "node/0";
  first.wanted_slot = 0;
  first.epochs.min_nodes = first.epochs.max_nodes = 2;
  NodeMembershipOptions second = first;
  second.name = "node/1";
  second.wanted_slot = 1;
  second.epochs.max_nodes = 3;
  const NodeDetails details{NodeFacts{1, "default", "a host", 0}, "the first one", "a host", 1};
  const auto one = NodeMembership::join(member_of(store), first, details);
  ASSERT_TRUE(one.ok()) << one.status().message();
  {
    const auto other = NodeMembership::join(member_of(store), second, details);
    ASSERT_TRUE(other.ok()) << other.status().message();
    const NodeNotice notice =
        next_notice(**other, [](const NodeNotice& each) { return each.event.has_value(); });
    ASSERT_TRUE(notice.event && std::holds_alternative<JobEnded>(*notice.event));
    const std::string reason = std::get<JobEnded>(*notice.event).reason;
    for (const char* part : {"--nnodes 2:3", "--nnodes 2;", "the first one"})
      EXPECT_NE(reason.find(part), std::string::npos) << part << " in " << reason;
  }
  second.epochs = first.epochs;
  const auto right = NodeMembership::join(member_of(store), second, details);
  ASSERT_TRUE(right.ok()) << right.status().message();
  const NodeNotice begun =
      next_notice(**one, [](const NodeNotice& notice) { return notice.event.has_value(); });
  ASSERT_TRUE(begun.plan);
  EXPECT_EQ(begun.plan->nodes.size(), 2u);
}

// spec: L16.program a launcher with another program or other arguments under a job's id is refused
// by name, and gets no seat of the job's
TEST(NodeMembership, RefusesItselfWithAnotherProgram) {
  const auto store = served_store();
  NodeMembershipOptions first;
  first.name = "node/a";
  first.job = "nightly";
  first.epochs.max_nodes = 2;
  first.epochs.last_call = Duration(0);
  first.epochs.program_id = "1";
  NodeMembershipOptions second = first;
  second.name = "node/b";
  second.epochs.program_id = "2";
  NodeDetails details{NodeFacts{1, "default", "a host", 0}, "the first one", "a host", 1};
  details.program = "train.py";
  const auto one = NodeMembership::join(member_of(store), first, details);
  ASSERT_TRUE(one.ok()) << one.status().message();
  const auto has_event = [](const NodeNotice& notice) { return notice.event.has_value(); };
  EXPECT_TRUE(next_notice(**one, has_event).plan);
  details.program = "other.py";
  const auto other = NodeMembership::join(member_of(store), second, details);
  ASSERT_TRUE(other.ok()) << other.status().message();
  const NodeNotice notice = next_notice(**other, has_event);
  ASSERT_TRUE(notice.event && std::holds_alternative<JobEnded>(*notice.event));
  const std::string reason = std::get<JobEnded>(*notice.event).reason;
  for (const char* part : {"train.py", "other.py", "the first one", "nightly"})
    EXPECT_NE(reason.find(part), std::string::npos) << part << " in " << reason;
  // The first one goes on alone: no epoch has had the other.
  (*one)->report(membership::NodePhase::failed, 1, 3, "words");
  const NodeNotice over = next_notice(**one, has_event);
  ASSERT_TRUE(over.event && std::holds_alternative<JobEnded>(*over.event));
}

}  // namespace
}  // namespace muster::launch
