// SPDX-License-Identifier: BSD-3-Clause
#include <optional>
#include "jobs/membership/factory.h"
#include "jobs/membership/testing/membership_kinds.h"
#include "jobs/membership/testing/membership_suite.h"
#include "testing/etcd_cluster.h"
#include "testing/limits.h"

namespace muster::membership::testing {
namespace {

using muster::testing::EtcdCluster;
using std::chrono::seconds;

std::unique_ptr<Membership> member_of(const std::vector<std::string>& endpoints,
                                      const std::string& job,
                                      Duration timeout = muster::testing::kMustHappen,
                                      const std::string& secret = "a secret for the tests",
                                      std::optional<Duration> watch_limit = std::nullopt) {
  auto membership =
      make_etcd_membership({.endpoints = endpoints, .user = {}, .password = {}, .tls = {}}, "test",
                           job, Secret::given(secret), timeout, watch_limit.value_or(timeout));
  if (membership) return std::move(*membership);
  ADD_FAILURE() << membership.status().message();
  return nullptr;
}

// spec: L1.etcd the suite over etcd
INSTANTIATE_TYPED_TEST_SUITE_P(Etcd, MembershipSuite, EtcdKind);

using EtcdMembershipTest = ServerTest<EtcdCluster>;

// spec: L1 etcd: the leader's death ends no hold, and watches and commits go on
TEST_F(EtcdMembershipTest, SurvivesTheLeadersDeath) {
  EtcdCluster cluster(EtcdCluster::Options{.members = 3, .certificate = {}, .key = {}});
  const auto membership = member_of(cluster.endpoints(), "job");
  const auto hold = membership->hold("node/a", "before", seconds(10));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "before"));
  const auto first = membership->commit(epoch(1), 0);
  ASSERT_TRUE(first.ok()) << first.status().message();
  const int leader = cluster.leader();
  ASSERT_GE(leader, 0);
  cluster.kill(leader);
  const auto second = membership->commit(epoch(2), *first);
  ASSERT_TRUE(second.ok()) << second.status().message();
  const Status set = (*hold)->set("after");
  EXPECT_TRUE(set.ok()) << set.message();
  EXPECT_TRUE(watcher.sees("node/a", "after"));
  EXPECT_TRUE(watcher.until([&] { return watcher.epoch.number == 2; }));
  EXPECT_TRUE((*hold)->state().ok());
}

// spec: L14.service a member of etcd that hangs, and is the one that is asked first, ends no hold
TEST_F(EtcdMembershipTest, AMemberThatHangsEndsNoHold) {
  EtcdCluster cluster(EtcdCluster::Options{.members = 3, .certificate = {}, .key = {}});
  const int hangs = (cluster.leader() + 1) % 3;
  const std::vector<std::string> others{cluster.endpoint((hangs + 1) % 3),
                                        cluster.endpoint((hangs + 2) % 3)};
  const auto membership = member_of({cluster.endpoint(hangs), others[0], others[1]}, "job");
  const auto hold = membership->hold("node/a", "1", seconds(10));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto watch = member_of(others, "job")->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "1"));
  cluster.stop(hangs);
  // It is renewed although the member that is asked first says nothing.
  const TimePoint first = (*hold)->expires();
  while ((*hold)->state().ok() && (*hold)->expires() == first)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE((*hold)->state().ok()) << (*hold)->state().message();
  const Status set = (*hold)->set("2");
  EXPECT_TRUE(set.ok()) << set.message();
  EXPECT_TRUE(watcher.sees("node/a", "2"));
  cluster.resume(hangs);
}

// spec: L1 etcd: an outage that is longer than a call's limit and shorter than the leases ends no
// watch
TEST_F(EtcdMembershipTest, AWatchOutlivesAnOutageBelowTheLeases) {
  EtcdCluster cluster;
  const auto membership = member_of(cluster.endpoints(), "job", seconds(2),
                                    "a secret for the tests", muster::testing::kMustHappen);
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  ASSERT_TRUE((*watch)->next(muster::testing::kMustHappen).ok());
  cluster.kill(0);
  const auto nothing = (*watch)->next(seconds(4));
  EXPECT_TRUE(nothing.ok()) << nothing.status().message();
  cluster.start(0);
  const auto other = member_of(cluster.endpoints(), "job");
  const auto hold = other->hold("node/a", "1", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  Watcher watcher(std::move(*watch));
  EXPECT_TRUE(watcher.sees("node/a", "1"));
}

// spec: L1 etcd: a node that is cut off from the majority stops and says why
// spec: L5 a stale member that returns is refused
TEST_F(EtcdMembershipTest, WhoIsCutOffStopsAndIsRefusedWhenItReturns) {
  EtcdCluster cluster(EtcdCluster::Options{.members = 3, .certificate = {}, .key = {}});
  // The smaller half of the job reaches one member of the cluster, the larger the other two.
  const int cut = (cluster.leader() + 1) % 3;
  std::vector<std::string> others = cluster.endpoints();
  others.erase(others.begin() + cut);
  const auto smaller = member_of({cluster.endpoint(cut)}, "job", seconds(10));
  const auto larger = member_of(others, "job");
  auto hold = smaller->hold("node/small", "1", seconds(5));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto small_watch = smaller->watch("");
  ASSERT_TRUE(small_watch.ok());
  auto watch = larger->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/small", "1"));
  const auto first = larger->commit(epoch(1), 0);
  ASSERT_TRUE(first.ok()) << first.status().message();

  cluster.kill(cut);
  EXPECT_TRUE(watcher.misses("node/small"));
  const auto second = larger->commit(epoch(2), *first);
  ASSERT_TRUE(second.ok()) << second.status().message();
  Result<Update> update = Update();
  while (update.ok()) update = (*small_watch)->next(Duration(-1));
  EXPECT_EQ(update.status().code(), Code::network) << update.status().message();
  EXPECT_NE(update.status().message().find(cluster.endpoint(cut)), std::string::npos)
      << update.status().message();
  EXPECT_EQ((*hold)->state().code(), Code::timed_out);
  EXPECT_NE((*hold)->state().message().find("node/small"), std::string::npos);
  EXPECT_FALSE(smaller->commit(epoch(2), *first).ok());

  cluster.start(cut);
  EXPECT_FALSE((*hold)->set("back").ok()) << "a hold that was lost stays lost";
  Result<std::int64_t> stale = Status(Code::timed_out, "");
  while (stale.status().code() == Code::timed_out) stale = smaller->commit(epoch(2), *first);
  EXPECT_EQ(stale.status().code(), Code::refused) << stale.status().message();
  EXPECT_NE(stale.status().message().find("epoch 2"), std::string::npos);
}

// spec: W2, L16.secret who can write into etcd and has not the job's secret is no node of the job
// and decides nothing
TEST_F(EtcdMembershipTest, OthersHaveNoSay) {
  EtcdCluster cluster;
  const auto membership = member_of(cluster.endpoints(), "job"),
             outsider = member_of(cluster.endpoints(), "job", muster::testing::kMustHappen,
                                  "some other secret");
  expect_no_say(*outsider, *membership, 2);
}

// spec: L1 etcd: a cluster that does not answer is named
TEST(EtcdMembership, NamesAClusterThatDoesNotAnswer) {
  const std::string nobody = "127.0.0.1:" + std::to_string(muster::testing::reserve_port());
  const auto membership = make_etcd_membership(
      {.endpoints = {nobody}, .user = {}, .password = {}, .tls = {}}, "test", "job",
      Secret::random(), std::chrono::milliseconds(100), std::chrono::milliseconds(100));
  EXPECT_EQ(membership.status().code(), Code::timed_out);
  EXPECT_NE(membership.status().message().find(nobody), std::string::npos)
      << membership.status().message();
}

}  // namespace
}  // namespace muster::membership::testing
