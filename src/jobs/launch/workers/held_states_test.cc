// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/held_states.h"

#include <gtest/gtest.h>

namespace muster::launch {
namespace {

WorkerWords state_of(std::int64_t epoch, bool divided, std::int64_t commits) {
  WorkerWords words;
  words.committed = commits;
  words.state = {epoch, divided};
  return words;
}

WorkerWords with_memories(WorkerWords words, int count) {
  words.memories.emplace(static_cast<std::size_t>(count));
  return words;
}

// spec: L14.node a worker's state ends with it, also if it is heard of only then; that of the
// others counts
TEST(HeldStates, EndWithTheirWorkers) {
  HeldStates states(2);
  EXPECT_EQ(states.newest(), HeldState{});
  states.begin(0);
  states.begin(1);
  states.take(0, state_of(3, false, 10), false);
  EXPECT_EQ(states.newest(), (HeldState{3, false}));
  states.end(1);
  states.take(1, state_of(4, false, 12), false);
  EXPECT_EQ(states.newest(), (HeldState{3, false}));
  EXPECT_EQ(states.committed(), 12);
  states.begin(1);
  EXPECT_EQ(states.newest(), (HeldState{3, false}));
  states.end(0);
  EXPECT_EQ(states.newest(), HeldState{});
}

// spec: L7, L14.node parts in memory that the launcher holds are state while their worker is
// replaced, and before the next one has said anything
TEST(HeldStates, StayWhereTheLauncherHoldsThem) {
  HeldStates states(1);
  states.begin(0);
  states.take(0, with_memories(state_of(3, true, 10), 2), false);
  states.end(0);
  EXPECT_EQ(states.newest(), (HeldState{3, true}));
  states.begin(0);
  EXPECT_EQ(states.newest(), (HeldState{3, true}));
  states.take(0, state_of(5, true, 11), false);
  EXPECT_EQ(states.newest(), (HeldState{5, true}));
  WorkerWords lost;
  lost.lost = 11;
  states.take(0, lost, false);
  EXPECT_EQ(states.newest(), HeldState{});
}

// spec: L14.node the worker that can give the whole state is one that lives and has the newest
TEST(HeldStates, NameAWorkerThatHasThem) {
  HeldStates states(3);
  EXPECT_EQ(states.holder(), -1);
  for (const int place : {0, 1, 2}) states.begin(place);
  EXPECT_EQ(states.holder(), -1);
  states.take(0, state_of(3, false, 1), false);
  states.take(2, state_of(4, false, 1), false);
  EXPECT_EQ(states.holder(), 2);
  states.end(2);
  EXPECT_EQ(states.holder(), 0);
  states.take(1, with_memories(state_of(5, true, 1), 2), false);
  EXPECT_EQ(states.holder(), -1) << "its parts are in the launcher's memory";
}

// spec: L14.node a state is divided once one of the workers has said so of the same epoch
TEST(HeldStates, AreDividedIfAnyIs) {
  HeldStates states(2);
  states.begin(0);
  states.begin(1);
  states.take(0, state_of(3, false, 1), false);
  states.take(1, state_of(3, true, 1), false);
  EXPECT_EQ(states.newest(), (HeldState{3, true}));
  states.take(0, state_of(4, false, 2), false);
  EXPECT_EQ(states.newest(), (HeldState{4, false}));
}

// spec: L14.end the launcher of a node that was left out keeps a commit that a worker gave, and the
// parts in its memory, until the next workers have the state
TEST(HeldStates, AreKeptUntilTheNextWorkersHaveOne) {
  HeldStates states(2);
  for (const int place : {0, 1}) states.begin(place);
  states.take(0, state_of(3, false, 1), false);
  states.leave();
  states.leave();
  EXPECT_EQ(states.kept_in(), 0) << "no worker has given it";
  states.keep();
  EXPECT_EQ(states.kept_in(), 3);
  for (const int place : {0, 1}) {
    states.end(place);
    states.begin(place);
  }
  EXPECT_EQ(states.kept_in(), 3);
  states.take(1, state_of(5, false, 2), false);
  EXPECT_EQ(states.kept_in(), 0);

  states.take(0, with_memories(state_of(6, true, 3), 2), false);
  states.leave();
  EXPECT_EQ(states.kept_in(), 6);
  states.take(0, with_memories({}, 0), false);
  EXPECT_EQ(states.kept_in(), 0) << "it holds no memory any more";
}

// spec: L14.lost_state once state is lost, or the job goes on without this node, commits from
// before are none any more
TEST(HeldStates, CommitsOfBeforeALossDoNotCount) {
  HeldStates states(1);
  states.begin(0);
  states.take(0, state_of(1, false, 500), false);
  WorkerWords lost;
  lost.lost = 500;
  lost.committed = 2;
  states.take(0, lost, true);
  EXPECT_EQ(states.committed(), 500);
  states.take(0, lost, false);
  EXPECT_EQ(states.committed(), 2);
  states.take(0, state_of(1, false, 500), false);
  states.leave();
  EXPECT_EQ(states.committed(), 0);
  EXPECT_EQ(states.newest(), HeldState{});
  states.take(0, state_of(1, false, 501), false);
  EXPECT_EQ(states.committed(), 0) << "of the workers that were left out";
  EXPECT_EQ(states.newest(), HeldState{});
  states.end(0);
  states.begin(0);
  states.take(0, state_of(3, false, 20), false);
  EXPECT_EQ(states.committed(), 20);
}

// spec: L7, L14.node a part that ends with one of several workers is gone, though the others have
// theirs, until workers here get a newer state; a whole state is gone with the last one only
TEST(HeldStates, TellOfPartsThatAreGone) {
  for (const bool divided : {true, false}) {
    HeldStates states(2);
    for (const int place : {0, 1}) states.begin(place);
    for (const int place : {0, 1}) states.take(place, state_of(3, divided, 1), false);
    EXPECT_EQ(states.gone_in(), 0);
    states.end(0);
    EXPECT_EQ(states.gone_in(), divided ? 3 : 0);
    states.begin(0);
    EXPECT_EQ(states.gone_in(), divided ? 3 : 0);
    states.end(1);
    EXPECT_EQ(states.gone_in(), 3);
    states.begin(1);
    states.take(0, state_of(4, divided, 2), false);
    EXPECT_EQ(states.gone_in(), 0);
    states.end(0);
    EXPECT_EQ(states.gone_in(), 4);
    states.leave();
    EXPECT_EQ(states.gone_in(), 0);
  }
  HeldStates held(1);
  held.begin(0);
  held.take(0, with_memories(state_of(3, true, 1), 2), false);
  held.end(0);
  EXPECT_EQ(held.gone_in(), 0) << "its launcher holds the memory";
}

}  // namespace
}  // namespace muster::launch
