#include "jobs/launch/node/scheduled_node.h"

#include <gtest/gtest.h>

#include <map>

namespace muster::launch {
namespace {

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
