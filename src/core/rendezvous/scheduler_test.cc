// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <map>

#include "core/rendezvous/scheduler.h"
#include "testing/fuzz.h"

namespace muster {
namespace {

std::optional<SchedulerRanks> detect(const std::map<std::string, std::string>& variables) {
  return detect_scheduler([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

// spec: B9 ranks under Slurm and MPI
TEST(Scheduler, ReadsTheirVariables) {
  const auto slurm = detect({{"SLURM_PROCID", "5"},
                             {"SLURM_NTASKS", "8"},
                             {"SLURM_LOCALID", "1"},
                             {"SLURM_NODEID", "1"},
                             {"SLURM_NTASKS_PER_NODE", "4"}});
  ASSERT_TRUE(slurm.has_value());
  EXPECT_EQ(slurm->name, "Slurm");
  EXPECT_EQ(slurm->rank, 5);
  EXPECT_EQ(slurm->world_size, 8);
  EXPECT_EQ(slurm->local_rank, 1);
  EXPECT_EQ(slurm->local_world_size, 4);
  EXPECT_EQ(slurm->node, 1);
  EXPECT_FALSE(slurm->can_meet_on_this_host());
  const auto mpi = detect({{"SLURM_PROCID", "0"},
                           {"SLURM_NTASKS", "1"},
                           {"OMPI_COMM_WORLD_RANK", "2"},
                           {"OMPI_COMM_WORLD_SIZE", "4"}});
  ASSERT_TRUE(mpi.has_value());
  EXPECT_EQ(mpi->rank, 2);
  EXPECT_FALSE(mpi->local_rank.has_value());
  EXPECT_EQ(detect({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}})->world_size, 2);
  EXPECT_FALSE(detect({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}).has_value());
  EXPECT_FALSE(detect({{"SLURM_PROCID", "x"}, {"SLURM_NTASKS", "1"}}).has_value());
  EXPECT_FALSE(detect({}).has_value());
}

// spec: B9 ranks that are all on this host, and what tells their job from others
TEST(Scheduler, KnowsWhoCanMeetOnThisHost) {
  const auto step = detect({{"SLURM_PROCID", "0"},
                            {"SLURM_NTASKS", "2"},
                            {"SLURM_NNODES", "1"},
                            {"SLURM_JOB_ID", "77"},
                            {"SLURM_STEP_ID", "0"}});
  EXPECT_TRUE(step->can_meet_on_this_host());
  EXPECT_EQ(step->job, "slurm 77.0");
  std::map<std::string, std::string> openmpi = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                {"PMIX_NAMESPACE", "1322713089"}};
  EXPECT_TRUE(detect(openmpi)->can_meet_on_this_host());
  openmpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  EXPECT_FALSE(detect(openmpi)->can_meet_on_this_host()) << "there are others elsewhere";
  const auto without_hydra =
      detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_TRUE(without_hydra->one_host);
  EXPECT_FALSE(without_hydra->can_meet_on_this_host()) << "nothing tells this launch from another";
  const auto pmi_by_srun = detect({{"PMI_RANK", "0"},
                                   {"PMI_SIZE", "2"},
                                   {"SLURM_NNODES", "1"},
                                   {"SLURM_JOB_ID", "77"},
                                   {"SLURM_STEP_ID", "3"}});
  EXPECT_EQ(pmi_by_srun->job, "slurm 77.3");
  EXPECT_TRUE(pmi_by_srun->can_meet_on_this_host());
}

// spec: B9 ranks of a step on several hosts do not meet on one, whatever limits the allocation has
TEST(Scheduler, TasksPerNodeAreALimitOfSlurms) {
  std::map<std::string, std::string> step = {{"SLURM_PROCID", "1"},  {"SLURM_NTASKS", "4"},
                                             {"SLURM_NNODES", "2"},  {"SLURM_NTASKS_PER_NODE", "4"},
                                             {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}};
  EXPECT_FALSE(detect(step)->one_host);
  step["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_TRUE(detect(step)->one_host);
}

// spec: B9 the shell of an allocation is a step of one task
TEST(Scheduler, TheStepSaysHowManyItsTasksAre) {
  const auto shell = detect({{"SLURM_PROCID", "0"},
                             {"SLURM_NTASKS", "8"},
                             {"SLURM_STEP_NUM_TASKS", "1"},
                             {"SLURM_JOB_ID", "77"},
                             {"SLURM_STEP_ID", "4294967290"}});
  EXPECT_EQ(shell->world_size, 1);
}

TEST(Scheduler, WhatABatchScriptRunsItselfIsNoRank) {
  EXPECT_FALSE(
      detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}}).has_value());
}

// As slurmd 22.05 sets them for `srun -N3 -n6`.
// spec: R1 srun ./program: rank, size and address from SLURM_*, no other setting
// spec: R1 compressed node lists
TEST(Scheduler, SlurmSaysWhereRankZeroIs) {
  std::map<std::string, std::string> step = {{"SLURM_PROCID", "4"},
                                             {"SLURM_NTASKS", "6"},
                                             {"SLURM_LOCALID", "0"},
                                             {"SLURM_NODEID", "2"},
                                             {"SLURM_NNODES", "3"},
                                             {"SLURM_JOB_ID", "77"},
                                             {"SLURM_STEP_ID", "0"},
                                             {"SLURM_JOB_NODELIST", "n[1-3,7]"},
                                             {"SLURM_TASKS_PER_NODE", "2(x3)"}};
  const auto first = detect(step);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->master, "n1");
  EXPECT_EQ(first->local_world_size, 2);
  EXPECT_FALSE(first->master_shares_domain);
  step["SLURM_STEP_NODELIST"] = "n[2-3,7]";
  const auto other_step = detect(step);
  EXPECT_EQ(other_step->master, "n2") << "the step's own list counts";
  EXPECT_EQ(first->port, other_step->port);
  step["SLURM_STEP_ID"] = "1";
  EXPECT_NE(detect(step)->port, first->port) << "steps of one job at the same time";
}

// spec: R1 array jobs: tasks of an array that share hosts have ports of their own
TEST(Scheduler, SlurmArraysHaveAPortForEachTask) {
  std::map<std::string, std::string> step = {{"SLURM_PROCID", "4"},
                                             {"SLURM_NTASKS", "6"},
                                             {"SLURM_LOCALID", "0"},
                                             {"SLURM_NODEID", "2"},
                                             {"SLURM_NNODES", "3"},
                                             {"SLURM_JOB_ID", "77"},
                                             {"SLURM_STEP_ID", "0"},
                                             {"SLURM_JOB_NODELIST", "n[1-3]"},
                                             {"SLURM_TASKS_PER_NODE", "2(x3)"}};
  const auto first = detect(step);
  ASSERT_TRUE(first.has_value());
  step["SLURM_ARRAY_JOB_ID"] = "77";
  step["SLURM_ARRAY_TASK_ID"] = "2";
  step["SLURM_JOB_ID"] = "79";
  EXPECT_NE(detect(step)->port, first->port) << "another task of the array";
}

// As mpirun of MPICH 4.0.2 (Hydra), Intel MPI 2021 and Open MPI 4.1.4 sets them.
// spec: R2 PMIx or PMI gives the address
TEST(Scheduler, KnowsHowRanksCanShareAnAddress) {
  EXPECT_EQ(detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"PMI_FD", "6"}})->exchange,
            SchedulerRanks::AddressExchange::pmi);
  EXPECT_EQ(detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}})->exchange,
            SchedulerRanks::AddressExchange::none);
  EXPECT_EQ(detect({{"OMPI_COMM_WORLD_RANK", "0"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"PMIX_NAMESPACE", "1369047041"}})
                ->exchange,
            SchedulerRanks::AddressExchange::pmix);
}

// spec: R3.job_set plain Indexed Jobs and JobSet: rank and pod 0's name from the pod's own
TEST(Scheduler, KubernetesNumbersItsPods) {
  const auto pod = detect(
      {{"JOB_COMPLETION_INDEX", "11"}, {"HOSTNAME", "train-workers-0-11"}, {"WORLD_SIZE", "16"}});
  ASSERT_TRUE(pod.has_value());
  EXPECT_EQ(pod->name, "Kubernetes");
  EXPECT_EQ(pod->rank, 11);
  EXPECT_EQ(pod->world_size, 16);
  EXPECT_EQ(pod->master, "train-workers-0-0");
  EXPECT_TRUE(pod->master_shares_domain);
  EXPECT_EQ(pod->port, 29500);
  EXPECT_FALSE(detect({{"JOB_COMPLETION_INDEX", "1"}}).has_value()) << "nobody says how many";
}

using Names = std::vector<std::string>;

// spec: R1.lists compressed node lists
TEST(SlurmLists, NodeListsAreExpanded) {
  EXPECT_EQ(expand_node_list("n1"), Names{"n1"});
  EXPECT_EQ(expand_node_list("n[1-3,7]"), (Names{"n1", "n2", "n3", "n7"}));
  EXPECT_EQ(expand_node_list("n[008-010],login"), (Names{"n008", "n009", "n010", "login"}));
  EXPECT_EQ(expand_node_list("a[1-2],b[3]"), (Names{"a1", "a2", "b3"}));
  EXPECT_EQ(expand_node_list("rack[1-2]n[1-2]"),
            (Names{"rack1n1", "rack1n2", "rack2n1", "rack2n2"}));
  EXPECT_EQ(expand_node_list("n[1-2]-ib"), (Names{"n1-ib", "n2-ib"}));
  EXPECT_EQ(expand_node_list("ip-10-0-0-1"), Names{"ip-10-0-0-1"});
  for (const char* wrong : {"", ",", "n[1-", "n[]", "n[3-1]", "n[1]]", "n[[1]]", "n[a-b]", "n]1[",
                            "n[1-9999999999]", "n[1-99999][1-99999]", "a,,b"})
    EXPECT_FALSE(expand_node_list(wrong).has_value()) << wrong;
}

// spec: R1 TASKS_PER_NODE 2(x3)
TEST(SlurmLists, TasksPerNodeAreExpanded) {
  EXPECT_EQ(expand_tasks_per_node("4"), std::vector<int>{4});
  EXPECT_EQ(expand_tasks_per_node("2(x3)"), (std::vector<int>{2, 2, 2}));
  EXPECT_EQ(expand_tasks_per_node("2(x2),1,3(x1)"), (std::vector<int>{2, 2, 1, 3}));
  for (const char* wrong : {"", "x", "2(x", "2(x)", "2(x3", "-1", "2,", "1(x9999999999)"})
    EXPECT_FALSE(expand_tasks_per_node(wrong).has_value()) << wrong;
}

TEST(SlurmListsFuzz, AnyTextIsAListOrIsNot) {
  testing::Fuzz fuzz(71);
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const std::string text = fuzz.babble(24, "n[]-,019(x)");
    if (const auto names = expand_node_list(text)) {
      EXPECT_FALSE(names->empty());
      EXPECT_LE(names->size(), 1'000'000u);
    }
    static_cast<void>(expand_tasks_per_node(text));
  }
}

}  // namespace
}  // namespace muster
