#include "muster/launch/node_membership.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "muster/membership/factory.h"
#include "muster/store/factory.h"

namespace muster::launch {
namespace {

std::unique_ptr<membership::Membership> member_of(std::shared_ptr<store::TcpStore> store) {
  auto made = membership::make_agent_membership(std::move(store), "job", std::chrono::seconds(30));
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

/// The next news for which `wanted` is true.
template <class Wanted>
NodeNews next_news(NodeMembership& node, Wanted wanted) {
  pollfd ready{node.descriptor(), POLLIN, 0};
  while (::poll(&ready, 1, 60'000) == 1) {
    for (NodeNews& news : node.take()) {
      if (wanted(news)) return std::move(news);
    }
  }
  ADD_FAILURE() << "no news within a minute";
  return {};
}

// spec: L12 an epoch is complete once its nodes have come to it; a node that has finished, the last
// one, still ends the job
TEST(NodeMembership, TellsOfACompleteEpochAndEndsTheJobAlone) {
  NodeMembershipOptions here;
  here.name = "node/0";
  const NodeDetails details{NodeFacts{1, "default", "a host", 0}, "a launcher", "a host", 1};
  auto node = NodeMembership::join(member_of(served_store()), here, details);
  ASSERT_TRUE(node.ok()) << node.status().message();
  const auto has_event = [](const NodeNews& news) { return news.event.has_value(); };
  const NodeNews begun = next_news(**node, has_event);
  ASSERT_TRUE(begun.plan);
  EXPECT_EQ(begun.plan->node, 0);
  (*node)->report(membership::NodePhase::running, 1, 0, {});
  EXPECT_EQ(next_news(**node, [](const NodeNews& news) { return news.complete > 0; }).complete, 1);

  (*node)->report(membership::NodePhase::finished, 1, 0, {});
  (*node)->report(membership::NodePhase::stopped, 0, 0, "words");
  const NodeNews over = next_news(**node, has_event);
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
  std::vector<NodeNews> news;
  pollfd ready{(*node)->descriptor(), POLLIN, 0};
  while (news.empty() && ::poll(&ready, 1, 60'000) == 1) news = (*node)->take();
  ASSERT_FALSE(news.empty());
  ASSERT_TRUE(news.front().event.has_value());
  const auto* end = std::get_if<JobEnded>(&*news.front().event);
  ASSERT_NE(end, nullptr);
  EXPECT_FALSE(end->succeeded);
  EXPECT_NE(end->reason.find("has 1 workers on this node, which starts 6"), std::string::npos)
      << end->reason;
}

}  // namespace
}  // namespace muster::launch
