// SPDX-License-Identifier: BSD-3-Clause
// Several nodes: launchers of one job on this machine.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "faces/cli/testing/launched.h"
#include "testing/limits.h"
#include "testing/reserved_port.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;
const Launched::Variables kSecret = {{"MUSTER_SECRET", "a secret for the tests"}};
const Launched::Variables kTalkative = {{"MUSTER_SECRET", "a secret for the tests"},
                                        {"MUSTER_LOG_LEVEL", "info"}};

std::string free_port() { return std::to_string(muster::testing::reserve_port()); }

std::vector<std::string> node_words(const std::string& port, int node, int workers,
                                    std::vector<std::string> rest, int nodes = 2) {
  std::vector<std::string> words = {"run",
                                    "--nnodes",
                                    std::to_string(nodes),
                                    "--node-rank",
                                    std::to_string(node),
                                    "--master-addr",
                                    "127.0.0.1",
                                    "--master-port",
                                    port,
                                    "--nproc-per-node",
                                    std::to_string(workers)};
  words.insert(words.end(), rest.begin(), rest.end());
  return words;
}

std::vector<std::string> assigned_words(const std::string& port, int workers,
                                        std::vector<std::string> rest) {
  std::vector<std::string> words = {"run",
                                    "--nnodes",
                                    "2:2",
                                    "--rdzv-backend",
                                    "c10d",
                                    "--rdzv-id",
                                    "assigned",
                                    "--rdzv-endpoint",
                                    "127.0.0.1:" + port,
                                    "--nproc-per-node",
                                    std::to_string(workers)};
  words.insert(words.end(), rest.begin(), rest.end());
  return words;
}

// spec: J3.static --nnodes with --rdzv-backend static; J5 ranks over two nodes of different sizes
TEST(Nodes, StaticNumbers) {
  const std::string port = free_port();
  const std::vector<std::string> program = {
      "sh", "-c",
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $ROLE_RANK $MASTER_ADDR "
      "$MUSTER_AGENT_STORE; "
      "echo at $MASTER_PORT; exec " +
          kWorker + " meet"};
  Launched second(node_words(port, 1, 1, program), kSecret);
  Launched first(node_words(port, 0, 2, program), kSecret);
  const Outcome one = first.finish(), two = second.finish();
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(two.code, 0) << two.err;
  const std::string store = " 127.0.0.1 127.0.0.1:" + port;
  const std::size_t at = one.out.find("at ");
  ASSERT_NE(at, std::string::npos) << one.out;
  const std::string meeting = one.out.substr(
      at, one.out.find('\n', at) - at);  // the same on both nodes, and not the store's
  EXPECT_NE(meeting, "at " + port);
  EXPECT_EQ(sorted_lines(one.out),
            (Lines{"[0] 0 3 0 2 0 0" + store, "[0] " + meeting, "[0] met 012",
                   "[1] 1 3 1 2 0 1" + store, "[1] " + meeting, "[1] met 012"}));
  EXPECT_EQ(sorted_lines(two.out),
            (Lines{"[2] 2 3 0 1 1 2" + store, "[2] " + meeting, "[2] met 012"}));
}

// spec: J3.c10d --rdzv-backend c10d: who serves the endpoint is node 0, the others are numbered as
// they come; J8 TORCHELASTIC_RUN_ID is --rdzv-id
TEST(Nodes, AssignedNumbers) {
  const std::string port = free_port();
  const std::vector<std::string> program = {
      "sh", "-c", "echo $GROUP_RANK $TORCHELASTIC_RUN_ID; exec " + kWorker + " meet"};
  Launched one(assigned_words(port, 1, program), kSecret),
      two(assigned_words(port, 1, program), kSecret);
  const Outcome a = one.finish(), b = two.finish();
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_EQ(b.code, 0) << b.err;
  EXPECT_EQ(sorted_lines(a.out + b.out),
            (Lines{"[0] 0 assigned", "[0] met 01", "[1] 1 assigned", "[1] met 01"}));
}

// spec: J3 two launchers at an endpoint whose name has two addresses: one of them serves, not both
TEST(Nodes, MeetAtANameWithTwoAddresses) {
  if (::geteuid() != 0) GTEST_SKIP() << "other names for addresses need root";
  const TemporaryFolder folder("muster-test-");
  const auto before = localhost_of_both_families(folder.path() + "/hosts");
  auto words = assigned_words(free_port(), 1, {kWorker, "meet"});
  for (std::string& each : words)
    if (each.starts_with("127.0.0.1:")) each.replace(0, 9, "localhost");
  Launched one(words, kSecret, before), two(words, kSecret, before);
  const Outcome a = one.finish(), b = two.finish();
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_EQ(b.code, 0) << b.err;
  EXPECT_EQ(sorted_lines(a.out + b.out), (Lines{"[0] met 01", "[1] met 01"}));
}

// spec: J3 the first failure ends the workers of all nodes; every launcher says where it was, and
// its exit code tells
TEST(Nodes, AFailureEndsTheOtherNodes) {
  for (int failing : {0, 1}) {
    const std::string port = free_port();
    const std::string script = kWorker + " meet; test $GROUP_RANK = " + std::to_string(failing) +
                               " && exit 6; exec sleep infinity";
    Launched first(node_words(port, 0, 1, {"sh", "-c", script}), kSecret),
        second(node_words(port, 1, 1, {"sh", "-c", script}), kSecret);
    const Outcome outcomes[2] = {first.finish(), second.finish()};
    for (int node : {0, 1}) EXPECT_EQ(outcomes[node].code, 6) << outcomes[node].err;
    const std::string rank = "rank " + std::to_string(failing);
    EXPECT_TRUE(contains(outcomes[failing].err, "FAILED: " + rank)) << outcomes[failing].err;
    EXPECT_TRUE(contains(outcomes[1 - failing].err,
                         "FAILED on another node: node " + std::to_string(failing)))
        << outcomes[1 - failing].err;
    EXPECT_TRUE(contains(outcomes[1 - failing].err, rank + " (local rank 0"))
        << outcomes[1 - failing].err;
  }
}

// spec: J3 the launcher that serves the store is killed: the other node's workers end and its
// launcher says why
TEST(Nodes, TheServingLauncherDies) {
  const std::string port = free_port();
  Launched first(node_words(port, 0, 1, {kWorker, "wait", "0"}), kSecret),
      second(node_words(port, 1, 1, {kWorker, "wait", "0"}), kSecret);
  ASSERT_TRUE(first.wait_for_output("ready"));
  ASSERT_TRUE(second.wait_for_output("ready"));
  first.signal(SIGKILL);
  const Outcome outcome = second.finish();
  EXPECT_NE(outcome.code, 0);
  EXPECT_TRUE(contains(outcome.out, "got SIGTERM")) << outcome.out;
  EXPECT_TRUE(contains(outcome.err, "store at 127.0.0.1:" + port)) << outcome.err;
}

// spec: J3 a signal to one node's launcher ends the job on all
TEST(Nodes, ASignalEndsAllNodes) {
  const std::string port = free_port();
  Launched first(node_words(port, 0, 1, {kWorker, "wait", "0"}), kSecret),
      second(node_words(port, 1, 1, {kWorker, "wait", "0"}), kSecret);
  ASSERT_TRUE(first.wait_for_output("ready"));
  ASSERT_TRUE(second.wait_for_output("ready"));
  second.signal(SIGINT);
  const Outcome one = first.finish(), two = second.finish();
  EXPECT_EQ(two.code, 128 + SIGINT);
  EXPECT_EQ(one.code, 128 + SIGINT) << one.err;
  EXPECT_TRUE(contains(one.err, "its launcher was stopped by SIGINT")) << one.err;
}

// spec: J3.stop a launcher that waits for other nodes can be stopped
TEST(Nodes, ASignalEndsTheWait) {
  Launched first(node_words(free_port(), 0, 1, {"true"}), kTalkative);
  ASSERT_TRUE(first.wait_for_error("waiting for 1 other node"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

/// Takes connections and says nothing, as a machine does that hangs.
class Silent {
 public:
  std::string port() const {
    return std::to_string(SocketAddress::local_of(listener_.get())->port());
  }
  bool take_one() {
    pollfd waiting{listener_.get(), POLLIN, 0};
    if (::poll(&waiting, 1, muster::testing::kMustHappenMs) != 1) return false;
    taken_.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return static_cast<bool>(taken_);
  }

 private:
  Descriptor listener_ = std::move(*listen_on(*SocketAddress::numeric("127.0.0.1", 0), 1));
  Descriptor taken_;
};

// spec: J3 a launcher that waits for its store can be stopped, also where it has no other node to
// wait for
TEST(Nodes, ASignalEndsTheWaitForAStore) {
  const auto at = [](const Silent& store, std::vector<std::string> words) {
    words.insert(words.begin(), "run");
    words.insert(words.end(), {"--rdzv-endpoint", "127.0.0.1:" + store.port(), "true"});
    return words;
  };
  const std::vector<std::vector<std::string>> kinds = {{"--nnodes", "1", "--rdzv-backend", "c10d"},
                                                       {"--nnodes", "2", "--rdzv-backend", "c10d"},
                                                       {"--nnodes", "2", "--node-rank", "1"}};
  for (const auto& kind : kinds) {
    for (const int number : {SIGTERM, SIGINT}) {
      Silent store;
      Launched launcher(at(store, kind), kSecret);
      ASSERT_TRUE(store.take_one());
      launcher.signal(number);
      const Outcome outcome = launcher.finish();
      EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, "stopped by SIG")) << outcome.err;
    }
  }
}

// spec: J3 a node that does not come is named when the time is up
TEST(Nodes, AMissingNodeIsNamed) {
  const Outcome outcome =
      run(node_words(free_port(), 0, 1, {"--join-timeout", "3", "true"}), kSecret);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(
      contains(outcome.err, "FAILED: 1 of at least 2 nodes came within 3 s; missing: node 1;"))
      << outcome.err;
}

// spec: J3 a first node whose own name is a loopback address, as in Debian's /etc/hosts, says that
// no other node can come
TEST(Nodes, ANameThatIsLoopbackOnTheFirstNode) {
  auto words = node_words(free_port(), 0, 1, {"true"});
  words[6] = "127.1";  // the resolver's 127.0.0.1, and no numeric address
  Launched first(words, kSecret);
  EXPECT_TRUE(first.wait_for_error("127.1 is 127.0.0.1 on this machine"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

// spec: J3 two nodes with one number are told
TEST(Nodes, TheSameNumberTwice) {
  const std::string port = free_port();
  Launched first(node_words(port, 0, 1, {"true"}, 3), kSecret);
  Launched second(node_words(port, 1, 1, {"true"}, 3), kTalkative);
  ASSERT_TRUE(second.wait_for_error("node 1 of 3"));
  const Outcome again = run(node_words(port, 1, 1, {"true"}, 3), kSecret);
  EXPECT_EQ(again.code, 1);
  EXPECT_TRUE(contains(again.err, "node rank 1 is taken already")) << again.err;
  // The others are not disturbed.
  Launched third(node_words(port, 2, 1, {"true"}, 3), kSecret);
  EXPECT_EQ(first.finish().code, 0);
  EXPECT_EQ(second.finish().code, 0);
  EXPECT_EQ(third.finish().code, 0);
}

// spec: J3 a job over several machines needs a secret, and the message says which variable
TEST(Nodes, AskForASecret) {
  const Outcome outcome = run({"run", "--nnodes", "2", "--node-rank", "1", "--master-addr",
                               "192.0.2.99", "--master-port", "29500", "true"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.err, "MUSTER_SECRET")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "MUSTER_SECRET_FILE")) << outcome.err;
}

// spec: J3 a node with another secret is refused
TEST(Nodes, RefuseAnotherSecret) {
  const std::string port = free_port();
  Launched first(node_words(port, 0, 1, {"true"}), kTalkative);
  ASSERT_TRUE(first.wait_for_error("waiting for 1 other node"));
  const Outcome refused =
      run(node_words(port, 1, 1, {"true"}), {{"MUSTER_SECRET", "quite another secret"}});
  EXPECT_EQ(refused.code, 1);
  EXPECT_TRUE(contains(refused.err, "MUSTER_SECRET")) << refused.err;
  EXPECT_EQ(run(node_words(port, 1, 1, {"true"}), kSecret).code, 0);
  EXPECT_EQ(first.finish().code, 0);
}

}  // namespace
}  // namespace muster::cli::testing
