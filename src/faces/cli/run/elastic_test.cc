// SPDX-License-Identifier: BSD-3-Clause
// Jobs whose nodes join, leave, fail and die: several launchers on this machine, and on hosts that
// are network namespaces. No test waits for a time: last call, join and keep-alive are set to
// hours, so that whatever needed one of them would never end.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <deque>
#include <set>

#include "faces/cli/testing/launched.h"
#include "testing/etcd_cluster.h"
#include "testing/kubernetes_api.h"
#include "testing/network_namespaces.h"
#include "testing/reserved_port.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;
using Words = std::vector<std::string>;
const Launched::Variables kElasticSecret = {{"MUSTER_SECRET", "a secret for the tests"},
                                            {"MUSTER_LOG_LEVEL", "info"}};

/// Says what it was told, meets all other workers, and waits: SIGUSR1 ends it well.
const std::string kVariables =
    "echo is $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
    "$ROLE_RANK $ROLE_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS "
    "$MUSTER_EPOCH; ";
const std::string kMeetAndWait = kVariables + kWorker + " meet && exec " + kWorker + " wait 0";

struct Job {
  std::string nodes = "1:3";
  int workers = 1;
  std::string restarts = "0";
  std::string script = kMeetAndWait;
  std::string last_call = "0";  ///< as soon as the least number is there
  std::string keep_alive = "3600";
  std::string service_timeout = "3600";
  std::string host = "127.0.0.1";
  std::string port = std::to_string(muster::testing::reserve_port());
  std::string service{};  ///< where the nodes meet; empty: at `host`
  std::string backend = service.empty() ? "c10d" : "etcd";
  Words more{};

  Words words() const {
    Words words = {"run",
                   "--nnodes",
                   nodes,
                   "--rdzv-backend",
                   backend,
                   "--rdzv-id",
                   "elastic",
                   "--rdzv-endpoint",
                   service.empty() ? host + ":" + port : service,
                   "--nproc-per-node",
                   std::to_string(workers),
                   "--max-restarts",
                   restarts,
                   "--rdzv-conf",
                   "join_timeout=3600,last_call_timeout=" + last_call + ",keep_alive_interval=" +
                       keep_alive + ",keep_alive_max_attempt=1,service_timeout=" + service_timeout};
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), {"sh", "-c", script});
    return words;
  }
};

/// "is 1 4 ..." of the workers of one launcher, in the order of their ranks, once each of the
/// `workers` has met all `world` ranks.
Lines told(Launched& node, int workers, int world) {
  std::string met = "met ";
  for (int rank = 0; rank < world; ++rank) met += std::to_string(rank);
  node.wait_for_output(met + "\n", workers);
  node.wait_for_output("ready", workers);
  Lines lines;
  for (std::string line : sorted_lines(node.take_output())) {
    const std::size_t at = line.find("] is ");
    if (at != std::string::npos) lines.push_back(line.substr(at + 5));
  }
  return lines;
}

// spec: L2.range nodes join and leave within the range, all workers restart, ranks are assigned
// anew; J5 every variable is right after each restart; L3.death nothing waits for a time; L4
// survivors keep their slots, and a replacement has the lost one; the node that serves the store
// says that the job ends with it
TEST(Elastic, NodesJoinLeaveAndDie) {
  Job job{.nodes = "2:3", .workers = 2};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("the job ends with it"));
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  EXPECT_EQ(told(a, 2, 4), (Lines{"0 4 0 2 0 2 0 4 0 0 1", "1 4 1 2 0 2 1 4 0 0 1"}));
  EXPECT_EQ(told(b, 2, 4), (Lines{"2 4 0 2 1 2 2 4 0 0 1", "3 4 1 2 1 2 3 4 0 0 1"}));

  Launched c(job.words(), kElasticSecret);  // joins
  EXPECT_EQ(told(a, 2, 6), (Lines{"0 6 0 2 0 3 0 6 0 0 2", "1 6 1 2 0 3 1 6 0 0 2"}));
  EXPECT_EQ(told(b, 2, 6), (Lines{"2 6 0 2 1 3 2 6 0 0 2", "3 6 1 2 1 3 3 6 0 0 2"}));
  EXPECT_EQ(told(c, 2, 6), (Lines{"4 6 0 2 2 3 4 6 0 0 2", "5 6 1 2 2 3 5 6 0 0 2"}));

  b.signal(SIGKILL);  // dies
  EXPECT_EQ(told(a, 2, 4), (Lines{"0 4 0 2 0 2 0 4 0 0 3", "1 4 1 2 0 2 1 4 0 0 3"}));
  EXPECT_EQ(told(c, 2, 4), (Lines{"2 4 0 2 1 2 2 4 0 0 3", "3 4 1 2 1 2 3 4 0 0 3"}));

  Launched d(job.words(), kElasticSecret);  // takes its slot
  EXPECT_EQ(told(a, 2, 6), (Lines{"0 6 0 2 0 3 0 6 0 0 4", "1 6 1 2 0 3 1 6 0 0 4"}));
  EXPECT_EQ(told(d, 2, 6), (Lines{"2 6 0 2 1 3 2 6 0 0 4", "3 6 1 2 1 3 3 6 0 0 4"}));
  EXPECT_EQ(told(c, 2, 6), (Lines{"4 6 0 2 2 3 4 6 0 0 4", "5 6 1 2 2 3 5 6 0 0 4"}));

  c.signal(SIGTERM);  // leaves
  EXPECT_EQ(c.finish().code, 128 + SIGTERM);
  EXPECT_EQ(told(a, 2, 4), (Lines{"0 4 0 2 0 2 0 4 0 0 5", "1 4 1 2 0 2 1 4 0 0 5"}));
  EXPECT_EQ(told(d, 2, 4), (Lines{"2 4 0 2 1 2 2 4 0 0 5", "3 4 1 2 1 2 3 4 0 0 5"}));

  a.signal(SIGUSR1);
  d.signal(SIGUSR1);
  const Outcome first = a.finish(), last = d.finish();
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(last.code, 0) << last.err;
  EXPECT_TRUE(contains(first.err, "1 node joined; starting all workers again on 3 nodes"))
      << first.err;
  EXPECT_TRUE(contains(first.err, "node 1 (")) << first.err;
  EXPECT_TRUE(contains(first.err, ") is gone; starting all workers again on 2 nodes (epoch 3"))
      << first.err;
  EXPECT_TRUE(contains(first.err,
                       ") leaves: its launcher was stopped by SIGTERM; starting all "
                       "workers again on 2 nodes (epoch 5"))
      << first.err;
}

// spec: L2.range the first launcher says for how long it waits for more nodes than the least, and
// on how many the job begins
TEST(Elastic, ItIsSaidThatAJobWaitsForMoreAndBeginsWithFewer) {
  const Job job{.nodes = "1:2", .last_call = "1"};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("the job begins when 2 nodes have come, or 1 s after the last"));
  EXPECT_EQ(told(a, 1, 1), (Lines{"0 1 0 1 0 1 0 1 0 0 1"}));
  a.signal(SIGUSR1);
  const Outcome outcome = a.finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "1 node has come")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "; beginning on 1 of at most 2 nodes")) << outcome.err;
}

// spec: L2.range a job that has one node for good does not warn of the loss of others
TEST(Elastic, AJobOfOneNodeWarnsOfNoOther) {
  const Outcome outcome = run(
      {"run", "--standalone", "--elastic", "keep", "--max-restarts", "1", "true"}, kElasticSecret);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "the job ends with it")) << outcome.err;
}

/// Three nodes that meet in a service; that of rank 0 dies, and another takes its slot.
void expect_survivors_go_on(const Job& job, const Launched::Variables& variables) {
  Launched a(job.words(), variables);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), variables);
  EXPECT_EQ(told(a, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 0 1"}));
  EXPECT_EQ(told(b, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 0 1"}));
  Launched c(job.words(), variables);
  EXPECT_EQ(told(a, 1, 3), (Lines{"0 3 0 1 0 3 0 3 0 0 2"}));
  EXPECT_EQ(told(b, 1, 3), (Lines{"1 3 0 1 1 3 1 3 0 0 2"}));
  EXPECT_EQ(told(c, 1, 3), (Lines{"2 3 0 1 2 3 2 3 0 0 2"}));

  a.signal(SIGKILL);
  EXPECT_EQ(told(b, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 0 3"}));
  EXPECT_EQ(told(c, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 0 3"}));
  Launched d(job.words(), variables);
  EXPECT_EQ(told(d, 1, 3), (Lines{"0 3 0 1 0 3 0 3 0 0 4"}));
  EXPECT_EQ(told(b, 1, 3), (Lines{"1 3 0 1 1 3 1 3 0 0 4"}));
  EXPECT_EQ(told(c, 1, 3), (Lines{"2 3 0 1 2 3 2 3 0 0 4"}));

  for (Launched* node : {&b, &c, &d}) node->signal(SIGUSR1);
  for (Launched* node : {&b, &c, &d}) {
    const Outcome outcome = node->finish();
    EXPECT_EQ(outcome.code, 0) << outcome.err;
  }
}

// spec: L1 etcd; L2.etcd --rdzv-backend etcd: the node of rank 0, which serves the workers' store,
// dies, and the others go on; L4 a replacement has the lost slot
TEST(Elastic, NodesMeetInEtcd) {
  if (!muster::testing::EtcdCluster::installed())
    GTEST_SKIP() << muster::testing::EtcdCluster::kMissing;
  const muster::testing::EtcdCluster cluster;
  const Job job{.nodes = "2:3", .keep_alive = "5", .service = cluster.endpoint(0)};
  expect_survivors_go_on(job, kElasticSecret);
  // etcd keeps what it knows of a job.
  const Outcome late = run(job.words(), kElasticSecret);
  EXPECT_EQ(late.code, 1);
  EXPECT_TRUE(contains(late.err, "--rdzv-id")) << late.err;
}

// spec: R3 Lease membership: --rdzv-backend kubernetes: the node of rank 0 dies, and the others go
// on; L4 a replacement has the lost slot
TEST(Elastic, NodesMeetInKubernetes) {
  if (!muster::testing::KubernetesApi::installed())
    GTEST_SKIP() << muster::testing::KubernetesApi::kMissing;
  const muster::testing::KubernetesApi api;
  const Job job{
      .nodes = "2:3", .keep_alive = "5", .service = api.server(), .backend = "kubernetes"};
  Launched::Variables variables = kElasticSecret;
  variables["MUSTER_KUBERNETES_TOKEN_FILE"] = api.token_file();
  variables["MUSTER_KUBERNETES_NAMESPACE"] = "jobs";
  expect_survivors_go_on(job, variables);
}

// spec: L11.leader a cluster of three loses its leader in the middle of a job and nothing is lost
TEST(Elastic, EtcdLosesItsLeader) {
  if (!muster::testing::EtcdCluster::installed())
    GTEST_SKIP() << muster::testing::EtcdCluster::kMissing;
  muster::testing::EtcdCluster cluster({.members = 3});
  Job job{.nodes = "2:3", .backend = "etcd"};
  for (const std::string& member : cluster.endpoints())
    job.service += (job.service.empty() ? "" : ",") + member;
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  EXPECT_EQ(told(a, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 0 1"}));
  EXPECT_EQ(told(b, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 0 1"}));

  const int leader = cluster.leader();
  ASSERT_GE(leader, 0);
  cluster.kill(leader);
  Launched c(job.words(), kElasticSecret);  // joins through the others
  EXPECT_EQ(told(a, 1, 3), (Lines{"0 3 0 1 0 3 0 3 0 0 2"}));
  EXPECT_EQ(told(b, 1, 3), (Lines{"1 3 0 1 1 3 1 3 0 0 2"}));
  EXPECT_EQ(told(c, 1, 3), (Lines{"2 3 0 1 2 3 2 3 0 0 2"}));
  for (Launched* node : {&a, &b, &c}) node->signal(SIGUSR1);
  for (Launched* node : {&a, &b, &c}) {
    const Outcome outcome = node->finish();
    EXPECT_EQ(outcome.code, 0) << outcome.err;
  }
}

// spec: J3 L11 signals end launchers and their workers while the service stands still, before and
// after the nodes have met
TEST(Elastic, SignalsDoNotWaitForEtcd) {
  if (!muster::testing::EtcdCluster::installed())
    GTEST_SKIP() << muster::testing::EtcdCluster::kMissing;
  muster::testing::EtcdCluster cluster;
  const Job job{.nodes = "2", .service = cluster.endpoint(0)};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  told(a, 1, 2);
  told(b, 1, 2);
  const Job another{.nodes = "2", .service = cluster.endpoint(0), .more = {"--rdzv-id", "2"}};
  Launched alone(another.words(), kElasticSecret);
  ASSERT_TRUE(alone.wait_for_error("waiting for 1 other node"));
  cluster.stop(0);
  const std::vector<std::pair<Launched*, int>> signals{
      {&a, SIGTERM}, {&b, SIGINT}, {&alone, SIGTERM}};
  for (const auto& [node, number] : signals) node->signal(number);
  for (const auto& [node, number] : signals) {
    const Outcome outcome = node->finish();  // the service stands until all have ended
    EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
  }
}

// spec: L3 L11 workers are ended while the service stands still, once the time of their nodes'
// places is over
TEST(Elastic, FencingDoesNotWaitForEtcd) {
  if (!muster::testing::EtcdCluster::installed())
    GTEST_SKIP() << muster::testing::EtcdCluster::kMissing;
  muster::testing::EtcdCluster cluster;
  const Job job{
      .nodes = "2", .keep_alive = "2", .service_timeout = "1", .service = cluster.endpoint(0)};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  told(a, 1, 2);
  told(b, 1, 2);
  cluster.stop(0);
  for (Launched* node : {&a, &b}) {
    const Outcome outcome = node->finish();  // the service stands until all have ended
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_TRUE(contains(outcome.err,
                         "this node ends its workers, asks for another place, and "
                         "leaves the job if the service stays silent"))
        << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "etcd")) << outcome.err;
  }
}

// spec: J4 a worker that fails: the workers of all nodes restart, up to max-restarts
TEST(Elastic, AFailureRestartsAllNodes) {
  // Rank 1 fails twice; every restart is of both nodes.
  const std::string script =
      kVariables + kWorker + " meet; test $RANK = 1 || exec " + kWorker + " wait 0; exit 7";
  Job job{.nodes = "2", .restarts = "2", .script = script};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  const Outcome one = a.finish(), two = b.finish();
  EXPECT_EQ(one.code, 7) << one.err;
  EXPECT_EQ(two.code, 7) << two.err;
  for (int restart = 0; restart <= 2; ++restart) {
    const std::string tail =
        " " + std::to_string(restart) + " 2 " + std::to_string(restart + 1) + "\n";
    EXPECT_TRUE(contains(one.out, "is 0 2 0 1 0 2 0 2" + tail)) << one.out;
    EXPECT_TRUE(contains(two.out, "is 1 2 0 1 1 2 1 2" + tail)) << two.out;
  }
  EXPECT_EQ(count_of(one.out, "is 0"), 3) << one.out;
  EXPECT_TRUE(contains(one.err, "restart 2 of 2")) << one.err;
  EXPECT_TRUE(contains(one.err, "FAILED on another node: node 1 (")) << one.err;
  EXPECT_TRUE(contains(two.err, "FAILED: rank 1 (local rank 0")) << two.err;
}

// spec: L4 a fixed set with restarts waits for a replacement of a dead node; survivors keep their
// ranks; J4 that is no restart
TEST(Elastic, AReplacementTakesTheDeadNodesRanks) {
  Job job{.nodes = "3", .restarts = "1"};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 2 other nodes"));
  Launched b(job.words(), kElasticSecret);
  ASSERT_TRUE(b.wait_for_error("waiting for 2 other nodes"));
  Launched c(job.words(), kElasticSecret);
  const Lines mine = told(b, 1, 3), theirs = told(c, 1, 3);
  EXPECT_EQ(told(a, 1, 3), (Lines{"0 3 0 1 0 3 0 3 0 1 1"}));
  b.signal(SIGKILL);
  Launched d(job.words(), kElasticSecret);
  const auto epoch_2 = [](Lines lines) {
    for (std::string& line : lines) line.back() = '2';
    return lines;
  };
  EXPECT_EQ(told(d, 1, 3), epoch_2(mine));
  EXPECT_EQ(told(c, 1, 3), epoch_2(theirs));
  EXPECT_EQ(told(a, 1, 3), (Lines{"0 3 0 1 0 3 0 3 0 1 2"}));
  for (Launched* node : {&a, &c, &d}) node->signal(SIGUSR1);
  for (Launched* node : {&a, &c, &d}) EXPECT_EQ(node->finish().code, 0);
}

// spec: L4 more nodes than the job has seats wait, and one takes the seat of a node that dies
TEST(Elastic, ANodeTooManyWaits) {
  Job job{.nodes = "2:2", .restarts = "1"};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  EXPECT_EQ(told(a, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 1 1"}));
  EXPECT_EQ(told(b, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 1 1"}));
  Launched spare(job.words(), kElasticSecret);
  ASSERT_TRUE(spare.wait_for_error("waiting for 1 other node"));
  b.signal(SIGKILL);
  EXPECT_EQ(told(spare, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 1 2"}));
  EXPECT_EQ(told(a, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 1 2"}));
  a.signal(SIGUSR1);
  spare.signal(SIGUSR1);
  EXPECT_EQ(a.finish().code, 0);
  EXPECT_EQ(spare.finish().code, 0);
}

// spec: J3 nodes that are told addresses of their own still meet at the endpoint: none serves a job
// for itself
TEST(Elastic, AnAddressOfItsOwnMakesNoNodeTheServer) {
  Job job{.nodes = "2"};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  job.more = {"--local-addr", "127.0.0.2"};
  Launched b(job.words(), kElasticSecret);
  for (Launched* node : {&a, &b}) EXPECT_EQ(told(*node, 1, 2).size(), 1u);
  for (Launched* node : {&a, &b}) node->signal(SIGUSR1);
  for (Launched* node : {&a, &b}) EXPECT_EQ(node->finish().code, 0);
}

// spec: L3 a fixed set without restarts: the death of a launcher ends the job at once, by name
TEST(Elastic, AFixedSetEndsWithItsNode) {
  Job job{.nodes = "2"};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  told(b, 1, 2);
  b.signal(SIGKILL);
  const Outcome outcome = a.finish();
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.err, "FAILED on another node: node 1 (")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, ") is gone")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "; 1 node of at least 2 are left")) << outcome.err;
}

// spec: J4 workers that have ended well start again when another node's worker fails
TEST(Elastic, ASuccessIsOfTheWholeJob) {
  const std::string script =
      kWorker + " meet; echo epoch $MUSTER_EPOCH; test $RANK$MUSTER_EPOCH != 11";
  Job job{.nodes = "2", .restarts = "1", .script = script};
  Launched a(job.words(), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(job.words(), kElasticSecret);
  const Outcome one = a.finish(), two = b.finish();
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(two.code, 0) << two.err;
  for (const Outcome& outcome : {one, two})
    EXPECT_TRUE(contains(outcome.out, "epoch 2")) << outcome.out;
}

// spec: S8 the workers are told the launch that their epochs belong to: the same on all nodes and
// in each epoch, and another one in the next launch of the job
TEST(Elastic, AllEpochsOfALaunchHaveOneName) {
  std::set<std::string> launches;
  for (int launch = 0; launch < 2; ++launch) {
    Job job{.nodes = "2",
            .restarts = "1",
            .script = kWorker + " meet; echo \"launch=$MUSTER_LAUNCH\"; test $MUSTER_EPOCH != 1"};
    Launched a(job.words(), kElasticSecret);
    ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
    Launched b(job.words(), kElasticSecret);
    std::set<std::string> told;
    for (const Outcome& outcome : {a.finish(), b.finish()}) {
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      std::size_t at = 0;
      while ((at = outcome.out.find("launch=", at)) != std::string::npos) {
        const std::size_t end = outcome.out.find('\n', at);
        told.insert(outcome.out.substr(at, end - at));
        at = end;
      }
    }
    ASSERT_EQ(told.size(), 1u);
    EXPECT_NE(*told.begin(), "launch=");
    launches.insert(*told.begin());
  }
  EXPECT_EQ(launches.size(), 2u);
}

// spec: L2.keep_alive a host whose link is pulled: the others go on after the keep-alive time; L5
// the host that was cut off stops by itself and says why
TEST(Elastic, AHostIsCutOff) {
  auto hosts = muster::testing::NetworkNamespaces::create(3);
  if (!hosts) GTEST_SKIP() << hosts.status().message();
  Job job{.nodes = "2:3", .keep_alive = "3", .service_timeout = "1", .host = (*hosts)->address(0)};
  const auto on = [&](int host) {
    Job there = job;
    there.more = {"--local-addr", (*hosts)->address(host)};
    return there.words();
  };
  const auto enter = [&](int host) {
    return [&hosts, host] {
      if (!(*hosts)->enter(host)) ::_exit(126);
    };
  };
  Launched a(on(0), kElasticSecret, enter(0));
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  // The endpoint is an address of host 0 alone: the others connect there.
  Launched b(on(0), kElasticSecret, enter(1));
  told(a, 1, 2);
  told(b, 1, 2);
  Launched c(on(0), kElasticSecret, enter(2));
  told(a, 1, 3);
  told(b, 1, 3);
  EXPECT_EQ(told(c, 1, 3), (Lines{"2 3 0 1 2 3 2 3 0 0 2"}));
  ASSERT_TRUE((*hosts)->set_plugged(1, false).ok());
  EXPECT_EQ(told(a, 1, 2), (Lines{"0 2 0 1 0 2 0 2 0 0 3"}));
  EXPECT_EQ(told(c, 1, 2), (Lines{"1 2 0 1 1 2 1 2 0 0 3"}));
  const Outcome lost = b.finish();
  EXPECT_EQ(lost.code, 1);
  EXPECT_TRUE(contains(lost.err, "the job's store at")) << lost.err;
  a.signal(SIGUSR1);
  c.signal(SIGUSR1);
  EXPECT_EQ(a.finish().code, 0);
  EXPECT_EQ(c.finish().code, 0);
}

// spec: L13.report L13.events the last report names every failure in order, with rank, node, exit
// code or signal and log file, on every node; --events writes them as JSON lines
TEST(Elastic, EveryFailureIsReportedInOrder) {
  const TemporaryFolder folder("muster-test-");
  // In epoch 1 rank 0 exits with 5, in epoch 2 rank 1 is killed.
  const std::string script = kWorker +
                             " meet; test $RANK$MUSTER_EPOCH = 01 && exit 5; "
                             "test $RANK$MUSTER_EPOCH = 12 && kill -KILL $$; exec sleep infinity";
  Job job{.nodes = "2", .restarts = "1", .script = script};
  const auto logging = [&](const std::string& name) {
    Job there = job;
    there.more = {"--tee",     "2",
                  "--log-dir", folder.path() + "/" + name,
                  "--events",  folder.path() + "/" + name + ".jsonl"};
    return there.words();
  };
  Launched a(logging("a"), kElasticSecret);
  ASSERT_TRUE(a.wait_for_error("waiting for 1 other node"));
  Launched b(logging("b"), kElasticSecret);
  const Outcome one = a.finish(), two = b.finish();
  for (const Outcome& outcome : {one, two}) {
    EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
    const std::size_t first = outcome.err.find("  1. node 0 (");
    const std::size_t second = outcome.err.find("  2. node 1 (");
    ASSERT_NE(first, std::string::npos) << outcome.err;
    ASSERT_NE(second, std::string::npos) << outcome.err;
    const std::string exited = outcome.err.substr(first, second - first);
    EXPECT_TRUE(contains(exited, "rank 0 (local rank 0, process ")) << exited;
    EXPECT_TRUE(contains(exited, "ended with exit code 5")) << exited;
    EXPECT_TRUE(contains(exited, "/a/elastic/node_0/attempt_0/0/stderr.log")) << exited;
    const std::string killed = outcome.err.substr(second);
    EXPECT_TRUE(contains(killed, "was ended by SIGKILL")) << killed;
    EXPECT_TRUE(contains(killed, "/b/elastic/node_1/attempt_1/0/stderr.log")) << killed;
  }
  const std::string events = contents(folder.path() + "/b.jsonl");
  EXPECT_EQ(count_of(events, "\"event\":\"workers_started\""), 2) << events;
  EXPECT_EQ(count_of(events, "\"event\":\"failed_elsewhere\""), 1) << events;
  EXPECT_TRUE(contains(events, "\"signal\":\"SIGKILL\"")) << events;
  EXPECT_TRUE(contains(events, "\"exit_code\":137")) << events;
  EXPECT_TRUE(contains(contents(folder.path() + "/a.jsonl"), "\"exit_code\":5,")) << events;
}

}  // namespace
}  // namespace muster::cli::testing
