#include "muster/base/scheduler.h"

#include <gtest/gtest.h>

#include <map>

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

}  // namespace
}  // namespace muster
