// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/epoch_words.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace muster::launch {
namespace {

// spec: L2.range a first epoch on fewer nodes than may come is told of, one on all of them is not
TEST(EpochWords, SayThatAJobBeginsWithFewer) {
  RunOptions options;
  options.nodes = 2;
  options.min_nodes = 1;
  membership::Epoch epoch;
  epoch.number = 1;
  epoch.reason = "1 node has come";
  epoch.members.resize(1);
  EXPECT_EQ(start_text(epoch, options, 0, false),
            "1 node has come; beginning on 1 of at most 2 nodes");
  EXPECT_NE(start_text(epoch, options, 1, false).find("starting all workers again"),
            std::string::npos);
  epoch.number = 3;
  EXPECT_EQ(start_text(epoch, options, 0, false), "") << "this node joins a job that runs";
  epoch.number = 1;
  epoch.members.resize(2);
  EXPECT_EQ(start_text(epoch, options, 0, false), "");
  EXPECT_EQ(waiting_text(options),
            "waiting for more nodes: the job begins when 2 nodes have come, or 30 s after the last "
            "one if at least 1 has");
  options.min_nodes = 0;
  EXPECT_EQ(waiting_text(options), "");
}

// spec: L14.lost_state how many commits there were, how many are left, and what comes next
TEST(EpochWords, SayWhatIsLost) {
  EXPECT_EQ(loss_text(4, {800, 0}, false),
            "the state of the job is lost: no rank of epoch 4 has any of the 800 commits or more "
            "that were made before; training begins again with what the program loads itself");
  EXPECT_NE(loss_text(4, {1, 0}, false).find("of the 1 commit or more"), std::string::npos);
  EXPECT_EQ(
      loss_text(4, {800, 650}, false),
      "commits of the job are lost: of the 800 or more that were made before no rank of epoch "
      "4 has one after commit 650; training goes on from that one");
  EXPECT_EQ(loss_text(4, {650, 650}, false),
            "commits of the job may be lost: no rank of epoch 4 knows whether others made any "
            "after commit 650; training goes on from that one");
  for (const std::int64_t kept : {0, 650, 800})
    EXPECT_TRUE(
        loss_text(4, {800, kept}, true).ends_with("; the job ends, as --on-lost-state fail says"));
}

// spec: L6 a launcher whose workers all start says nothing false of those of other nodes
TEST(EpochWords, SayWhoseWorkersStart) {
  membership::Epoch epoch{.number = 3, .reason = "1 node joined"};
  epoch.members.resize(2);
  EXPECT_EQ(restart_text(epoch, 5, true),
            "1 node joined; starting all workers of this node, and other nodes keep those that "
            "live (epoch 3, restart 0 of 5)");
  EXPECT_EQ(restart_text(epoch, 5, false),
            "1 node joined; starting all workers again on 2 nodes (epoch 3, restart 0 of 5)");
  epoch.members.resize(1);
  EXPECT_EQ(restart_text(epoch, 5, true),
            "1 node joined; starting all workers of this node (epoch 3, restart 0 of 5)");
}

// spec: L14.node a launcher whose node an epoch left out says so, and what becomes of its workers
TEST(EpochWords, SayThatTheJobGoesOnWithoutThisNode) {
  EXPECT_EQ(left_out_text(2),
            "the job has gone on without this node (as of epoch 2): the workers here are ended, "
            "and start again once this node has a place");
}

// spec: L9 a launcher says at the signal that its workers leave, until when, and what comes then
TEST(EpochWords, SayWhatALauncherDoesAtASignal) {
  EXPECT_EQ(leaving_text(SIGTERM, std::chrono::seconds(30), true),
            "got SIGTERM: the workers here leave after their next commit, for which they have 30 "
            "s; then this node leaves, and the job goes on without it if enough others are left");
  EXPECT_TRUE(
      leaving_text(SIGUSR1, std::chrono::seconds(30), false).ends_with("; then the job ends"));
}

}  // namespace
}  // namespace muster::launch
