// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/wait/topology.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/options.h"

namespace muster::launch {
namespace {

constexpr Streams kNone = Streams::none, kOut = Streams::out, kErr = Streams::err,
                  kBoth = Streams::both;

// spec: J3.nnodes --nnodes N or MIN:MAX
TEST(ParseNodes, NumbersAndRanges) {
  EXPECT_EQ(parse_nodes("4")->least, 4);
  EXPECT_EQ(parse_nodes("4")->most, 4);
  EXPECT_EQ(parse_nodes("1:4")->least, 1);
  EXPECT_EQ(parse_nodes("1:4")->most, 4);
  for (const char* text : {"", "0", "-1", "4:1", "1:2:3", "x", "2:", ":2", "1.5"})
    EXPECT_EQ(parse_nodes(text).status().code(), Code::invalid_argument) << text;
}

// spec: J3.nproc_per_node --nproc-per-node (number, cpu, gpu, auto)
TEST(ParseWorkers, NumbersAndKinds) {
  EXPECT_EQ(*parse_workers("3"), 3);
  EXPECT_EQ(*parse_workers("cpu"), allowed_cores());
  EXPECT_EQ(*parse_workers("auto"), gpu_count() > 0 ? gpu_count() : allowed_cores());
  if (gpu_count() > 0) {
    EXPECT_EQ(*parse_workers("gpu"), gpu_count());
  } else {
    EXPECT_NE(parse_workers("gpu").status().message().find("no GPU"), std::string::npos);
  }
  for (const char* text : {"", "0", "-2", "many", "2x"})
    EXPECT_FALSE(parse_workers(text).ok()) << text;
}

// spec: J3 --redirects and --tee: one number for all, or by local rank
TEST(ParseStreams, AllOrByLocalRank) {
  EXPECT_EQ(*parse_streams("--tee", "3", 2), (std::vector{kBoth, kBoth}));
  EXPECT_EQ(*parse_streams("--tee", "0:1,2:2", 3), (std::vector{kOut, kNone, kErr}));
  EXPECT_EQ(*parse_streams("--tee", "0", 1), (std::vector{kNone}));
  for (const char* text : {"4", "-1", "x", "0:4", "3:1", "0:1,", "0:1:2", "a:1"}) {
    const auto parsed = parse_streams("--tee", text, 3);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_NE(parsed.status().message().find("--tee"), std::string::npos);
  }
}

// spec: J3 --local-ranks-filter
TEST(ParseRankSet, LocalRanks) {
  EXPECT_EQ(*parse_rank_set("--local-ranks-filter", "2,0", 3), (std::set{0, 2}));
  EXPECT_FALSE(parse_rank_set("--local-ranks-filter", "3", 3).ok());
  EXPECT_FALSE(parse_rank_set("--local-ranks-filter", "0,,1", 3).ok());
}

// spec: J3 --rdzv-endpoint with and without port, names, IPv4 and IPv6
TEST(ParseEndpoint, HostsAndPorts) {
  const auto check = [](const char* text, const char* host, int port) {
    const auto endpoint = parse_endpoint("--rdzv-endpoint", text);
    ASSERT_TRUE(endpoint.ok()) << text;
    EXPECT_EQ(endpoint->host, host);
    EXPECT_EQ(endpoint->port.has_value() ? int{*endpoint->port} : -1, port) << text;
  };
  check("node0", "node0", -1);
  check("node0:29400", "node0", 29400);
  check("10.0.0.1:0", "10.0.0.1", 0);
  check("::1", "::1", -1);
  check("[::1]:5", "::1", 5);
  check("[fe80::1]", "fe80::1", -1);
  for (const char* text : {"", ":5", "a:b", "a:70000", "[::1", "[::1]5"})
    EXPECT_FALSE(parse_endpoint("--rdzv-endpoint", text).ok()) << text;
}

RunOptions valid() {
  RunOptions options;
  options.program = "true";
  return options;
}

// spec: J8 --standalone needs no --rdzv-*; J3 several nodes need to know where and who they are
TEST(Validate, Contradictions) {
  EXPECT_TRUE(validate(valid()).ok());
  const auto refused = [](auto change, const char* word) {
    RunOptions options = valid();
    change(options);
    const Status status = validate(options);
    EXPECT_FALSE(status.ok()) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  refused([](RunOptions& o) { o.program.clear(); }, "no program");
  refused([](RunOptions& o) { o.standalone = true, o.nodes = 2; }, "--standalone");
  refused([](RunOptions& o) { o.node_rank = 1; }, "--node-rank");
  refused([](RunOptions& o) { o.nodes = 2, o.master_addr = "a"; }, "--node-rank");
  refused([](RunOptions& o) { o.nodes = 2, o.node_rank = 0; }, "--master-addr");
  refused([](RunOptions& o) { o.nodes = 2, o.min_nodes = 1, o.node_rank = 0, o.master_addr = "a"; },
          "--rdzv-backend c10d");
  const auto refused_with_etcd = [&](auto change, const char* word) {
    refused(
        [&](RunOptions& o) {
          o.nodes = 2, o.rendezvous = RendezvousKind::etcd, o.endpoint = "a", o.run_id = "j";
          change(o);
        },
        word);
  };
  refused_with_etcd([](RunOptions& o) { o.endpoint.reset(); }, "--rdzv-endpoint");
  refused_with_etcd([](RunOptions& o) { o.run_id.reset(); }, "--rdzv-id");
  refused_with_etcd([](RunOptions& o) { o.node_rank = 1; }, "--node-rank");
  refused([](RunOptions& o) { o.nodes = 2, o.rendezvous = RendezvousKind::kubernetes; },
          "--rdzv-id");
  for (const char* id : {"", "../x", ".", "a/b"})
    refused([&](RunOptions& o) { o.run_id = id; }, "--rdzv-id");
}

// spec: L2 --signals-to-handle
TEST(Options, Signals) {
  EXPECT_EQ(*parse_signals("--signals-to-handle", "SIGTERM,USR1"),
            (std::set<int>{SIGTERM, SIGUSR1}));
  for (const char* text : {"", "SIGTERM,", "SIGKILL", "SIGSTOP", "SIGNAL", "9"}) {
    const auto signals = parse_signals("--signals-to-handle", text);
    EXPECT_EQ(signals.status().code(), Code::invalid_argument) << text;
    EXPECT_NE(signals.status().message().find("--signals-to-handle"), std::string::npos) << text;
  }
}

// spec: J3 cpu means the cores of our affinity mask and control group
TEST(Host, CoresFollowTheQuota) {
  EXPECT_GE(allowed_cores(), 1);
  const double quota = cpu_quota();
  EXPECT_TRUE(quota == 0 || allowed_cores() <= std::ceil(quota)) << quota;
}

using Variables = std::map<std::string, std::string>;

VariableOf of(const Variables& variables) {
  return [variables](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

// As slurmd 22.05 sets them for `srun -N3 --ntasks-per-node=1`, on the second node.
const Variables kSrun = {{"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "3"},
                         {"SLURM_STEP_NUM_TASKS", "3"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_NNODES", "3"},
                         {"SLURM_STEP_NUM_NODES", "3"},
                         {"SLURM_JOB_ID", "41"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEPID", "0"},
                         {"SLURM_JOB_NODELIST", "n[1-3,7]"},
                         {"SLURM_STEP_NODELIST", "n[2-3,7]"},
                         {"SLURM_TASKS_PER_NODE", "1(x3)"},
                         {"SLURM_STEP_TASKS_PER_NODE", "1(x3)"}};

// spec: R1 srun muster run: one task a node, its number and node 0's address from SLURM_*
TEST(ScheduledNode, SlurmGivesNumberAndAddress) {
  RunOptions options;
  ASSERT_TRUE(take_scheduled_node(options, false, of(kSrun)).ok());
  EXPECT_EQ(options.nodes, 3);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "n2");
  ASSERT_TRUE(options.master_port.has_value());
  EXPECT_GE(*options.master_port, 20000);
  EXPECT_LT(*options.master_port, 30000);
  RunOptions array_task;
  Variables other = kSrun;
  other["SLURM_JOB_ID"] = "42";  // each task of an array job has a number of its own
  ASSERT_TRUE(take_scheduled_node(array_task, false, of(other)).ok());
  EXPECT_NE(array_task.master_port, options.master_port);
}

// spec: R1 srun muster run: options that are given count
TEST(ScheduledNode, GivenOptionsCount) {
  RunOptions given;
  given.nodes = 3;
  given.node_rank = 2;
  given.master_addr = "elsewhere";
  ASSERT_TRUE(take_scheduled_node(given, true, of(kSrun)).ok());
  EXPECT_EQ(given.node_rank, 2);
  RunOptions alone;
  alone.standalone = true;
  ASSERT_TRUE(take_scheduled_node(alone, false, of(kSrun)).ok());
  EXPECT_EQ(alone.nodes, 1);
  RunOptions fewer;
  fewer.nodes = 2;
  const Status status = take_scheduled_node(fewer, true, of(kSrun));
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("3 nodes"), std::string::npos) << status.message();
}

// spec: R1 srun muster run: several tasks on a node are refused in words
TEST(ScheduledNode, SeveralTasksOnANodeAreRefused) {
  Variables twice = kSrun;
  twice["SLURM_STEP_TASKS_PER_NODE"] = "2(x3)";
  RunOptions options;
  const Status status = take_scheduled_node(options, false, of(twice));
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("--ntasks-per-node=1"), std::string::npos) << status.message();
}

// spec: R3.indexed JobSet and plain Indexed Jobs: the pod's number, and pod 0's name
TEST(ScheduledNode, KubernetesGivesNumberAndName) {
  for (const auto& [pod, first] :
       {std::pair<std::string, std::string>{"train-workers-0-2", "train-workers-0-0"},
        {"digits-2", "digits-0"}}) {
    RunOptions options;
    options.nodes = 4;
    ASSERT_TRUE(
        take_scheduled_node(options, true, of({{"JOB_COMPLETION_INDEX", "2"}, {"HOSTNAME", pod}}))
            .ok());
    EXPECT_EQ(options.node_rank, 2);
    EXPECT_EQ(options.master_addr->substr(0, first.size()), first);
    EXPECT_EQ(options.master_port, 29500);
  }
}

TEST(ScheduledNode, NothingIsTakenElsewhere) {
  RunOptions options;
  ASSERT_TRUE(take_scheduled_node(options, false, of({})).ok());
  EXPECT_EQ(options.nodes, 1);
  EXPECT_FALSE(options.node_rank.has_value());
}

}  // namespace

}  // namespace muster::launch
