// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/factory.h"
#include "jobs/membership/testing/membership_kinds.h"
#include "jobs/membership/testing/membership_suite.h"
#include "testing/limits.h"
#include "testing/reserved_port.h"

namespace muster::membership::testing {
namespace {

using std::chrono::seconds;

// spec: L1.agent the suite over the agent of node 0
INSTANTIATE_TYPED_TEST_SUITE_P(Agent, MembershipSuite, AgentKind);

// spec: L1 agent: a watcher learns that the serving agent is gone
TEST(AgentMembership, TheEndOfTheServerEndsAWatch) {
  AgentKind kind;
  const auto membership = kind.open();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok()) << watch.status().message();
  ASSERT_TRUE((*watch)->next(kPatience).ok());
  std::thread ending([&] { kind.server.reset(); });
  const auto ended = (*watch)->next(Duration(-1));
  ending.join();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.status().code(), Code::network) << ended.status().message();
}

/// A server in a process of its own, which can stand still.
class StoppableServer {
 public:
  StoppableServer() {
    options_.port = muster::testing::reserve_port();
    child_.emplace([this] {
      store::TcpStoreOptions serving = options_;
      serving.is_server = true;
      server_ = *store::make_tcp_store(serving);
      return true;
    });
    EXPECT_TRUE(child_->ready());
  }
  std::unique_ptr<Membership> member() const {
    return std::move(
        *make_agent_membership(*store::make_tcp_store(options_), "job", seconds(5), kPatience));
  }
  void stop() { child_->stop(); }
  void go_on() { child_->go_on(); }

 private:
  store::TcpStoreOptions options_ = AgentKind::options();
  std::shared_ptr<store::TcpStore> server_;  // of the child
  std::optional<Bystander> child_;
};

// spec: L14 agent: a name that was lost while the server stood still, and is taken again, is
// renewed as the first hold was
TEST(AgentMembership, AHoldThatIsTakenAgainIsRenewed) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  StoppableServer server;
  const auto member = server.member(), watching = server.member();
  std::unique_ptr<Membership> theirs;
  std::unique_ptr<Hold> silent;
  auto hold = member->hold("node/a", "first", seconds(1));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  server.stop();
  const TimePoint limit = steady_clock().now() + kPatience;
  while ((*hold)->state().ok() && steady_clock().now() < limit) std::this_thread::yield();
  EXPECT_EQ((*hold)->state().code(), Code::timed_out);
  server.go_on();
  hold->reset();
  hold = member->hold("node/a", "second", seconds(1));
  ASSERT_TRUE(hold.ok()) << hold.status().message();

  // Another one that is silent for as long as the second hold lasts loses its name; this one not.
  Bystander child([&] {
    theirs = server.member();
    auto taken = theirs->hold("node/silent", "1", seconds(2));
    if (taken) silent = std::move(*taken);
    return silent != nullptr;
  });
  ASSERT_TRUE(child.ready());
  auto watch = watching->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/silent", "1"));
  child.stop();
  ASSERT_TRUE(watcher.misses("node/silent"));
  EXPECT_TRUE(watcher.names.contains("node/a"));
  EXPECT_TRUE((*hold)->state().ok()) << (*hold)->state().message();
}

// spec: L5 store requests of an older epoch are refused by name, also one that waits already
TEST(AgentMembership, StoreRequestsOfAnOlderEpochAreRefused) {
  AgentKind kind;
  const auto membership = kind.open();
  Epoch epoch{1, JobState::running, 0, 0, "a test", {{0, "node/a", ""}}};
  const auto first = membership->commit(epoch, 0);
  ASSERT_TRUE(first.ok()) << first.status().message();
  store::TcpStoreOptions of_worker = AgentKind::options();
  of_worker.port = kind.server->port();
  of_worker.role = Handshake::Role::store;
  of_worker.epoch = 1;
  of_worker.epoch_record = "muster/run/job/epoch";
  const auto old = store::make_tcp_store(of_worker);
  ASSERT_TRUE(old.ok()) << old.status().message();
  ASSERT_TRUE((*old)->set("key", "value").ok());
  Status waited;
  std::thread waiting([&] { waited = (*old)->get("never").status(); });
  epoch.number = 2;
  ASSERT_TRUE(membership->commit(epoch, *first).ok());
  waiting.join();
  const auto set = (*old)->set("key", "late"), made = store::make_tcp_store(of_worker).status();
  for (const Status& refused : {waited, set, made}) {
    EXPECT_EQ(refused.code(), Code::refused) << refused.message();
    EXPECT_NE(refused.message().find("belongs to epoch 1"), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("at epoch 2"), std::string::npos) << refused.message();
  }
  of_worker.epoch = 2;
  const auto young = store::make_tcp_store(of_worker);
  ASSERT_TRUE(young.ok()) << young.status().message();
  EXPECT_EQ(*(*young)->get("key"), "value");
}

}  // namespace
}  // namespace muster::membership::testing
