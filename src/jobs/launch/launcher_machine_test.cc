// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/launcher_machine.h"
#include "testing/budget.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace muster::launch {
namespace {

using std::chrono::seconds;
using Actions = std::vector<LauncherAction>;

// A machine with a clock that the test moves.
struct Machine {
  LauncherRules rules{.workers = 3};
  LauncherState state{};
  TimePoint now{};

  Actions on(const LauncherEvent& event) {
    Decision decision = decide(now, rules, std::move(state), event);
    state = std::move(decision.state);
    return decision.actions;
  }
  Actions end(int worker, ProcessExit exit = {}) { return on(WorkerEnded{worker, exit}); }
};

constexpr ProcessExit kFailed{.code = 3};
constexpr ProcessExit kTermed{.signal = SIGTERM};
constexpr ProcessExit kKilled{.signal = SIGKILL};

// spec: J3 all workers end well: exit code 0, nothing is signalled
TEST(LauncherMachine, AllEndWell) {
  Machine machine;
  EXPECT_EQ(machine.on(Begin{}), (Actions{StartWorkers{0}}));
  EXPECT_EQ(machine.end(2), Actions{});
  EXPECT_EQ(machine.end(0), Actions{});
  EXPECT_EQ(machine.state.timer, TimePoint::max());
  EXPECT_EQ(machine.end(1), (Actions{Finish{0}}));
  EXPECT_EQ(machine.state.phase, LauncherPhase::finished);
}

// spec: J3 the first failure ends the others with SIGTERM; the exit code is the first failure's
TEST(LauncherMachine, TheFirstFailureEndsTheOthers) {
  Machine machine;
  machine.on(Begin{});
  EXPECT_EQ(machine.end(1, kFailed), (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.state.timer, machine.now + seconds(30));
  EXPECT_EQ(machine.end(0, kTermed), Actions{});
  EXPECT_EQ(machine.end(2, {.code = 9}), (Actions{SweepWorkers{}, Finish{3}}));
  ASSERT_TRUE(machine.state.first_failure.has_value());
  EXPECT_EQ(machine.state.ends[*machine.state.first_failure].local_rank, 1);
  EXPECT_FALSE(machine.state.ends[0].asked);
  EXPECT_TRUE(machine.state.ends[1].asked);
}

// spec: J3 the exit code of a worker that a signal ended is 128 + signal
TEST(LauncherMachine, ASignalsExitCode) {
  Machine machine{.rules = {.workers = 1}};
  machine.on(Begin{});
  EXPECT_EQ(machine.end(0, kKilled).back(), LauncherAction(Finish{137}));
}

// spec: J3 those that ignore SIGTERM are killed when the settable time is up, not before
TEST(LauncherMachine, KillsWhenTheTimeIsUp) {
  Machine machine{.rules = {.workers = 2, .shutdown_timeout = seconds(7)}};
  machine.on(Begin{});
  machine.end(0, kFailed);
  machine.now += seconds(6);
  EXPECT_EQ(machine.on(TimerFired{}), Actions{});
  machine.now += seconds(1);
  EXPECT_EQ(machine.on(TimerFired{}), (Actions{SignalWorkers{SIGKILL}}));
  EXPECT_EQ(machine.state.timer, TimePoint::max());
  EXPECT_EQ(machine.end(1, kKilled).back(), LauncherAction(Finish{3}));
}

// spec: J3 a rank that was killed is the cause, even where one that failed because of it is seen to
// end first
TEST(LauncherMachine, AKilledWorkerIsTheCause) {
  Machine machine;
  machine.on(Begin{});
  machine.end(0, kFailed);
  machine.end(1, kTermed);
  EXPECT_EQ(machine.end(2, kKilled).back(), LauncherAction(Finish{137}));
  EXPECT_EQ(machine.state.ends[*machine.state.first_failure].local_rank, 2);
  // Not where the kill was ours.
  Machine ours{.rules = {.workers = 2}};
  ours.on(Begin{});
  ours.end(0, kFailed);
  ours.now = ours.state.timer;
  ours.on(TimerFired{});
  EXPECT_EQ(ours.end(1, kKilled).back(), LauncherAction(Finish{3}));
  EXPECT_TRUE(ours.state.ends[1].by_us);
}

// spec: J3 a shutdown timeout of 0 kills at once, and an endless one never
TEST(LauncherMachine, ExtremeShutdownTimeouts) {
  Machine at_once{.rules = {.workers = 2, .shutdown_timeout = seconds(0)}};
  at_once.on(Begin{});
  at_once.end(0, kFailed);
  EXPECT_EQ(at_once.state.timer, at_once.now);
  Machine never{.rules = {.workers = 2, .shutdown_timeout = Duration::max()}};
  never.now += seconds(5);
  never.on(Begin{});
  never.end(0, kFailed);
  EXPECT_EQ(never.state.timer, TimePoint::max());
}

// spec: J3 signals are passed on and end the job; a second one kills
TEST(LauncherMachine, StopSignalsArePassedOn) {
  Machine machine;
  machine.on(Begin{});
  EXPECT_EQ(machine.on(StopSignal{SIGINT}), (Actions{SignalWorkers{SIGINT}}));
  machine.end(0);
  EXPECT_EQ(machine.on(StopSignal{SIGINT}), (Actions{SignalWorkers{SIGKILL}}));
  machine.end(1, kKilled);
  EXPECT_EQ(machine.end(2, kKilled).back(), LauncherAction(Finish{130}));
  EXPECT_FALSE(machine.state.first_failure.has_value());
}

// spec: J3 SIGUSR1 and SIGUSR2 go to the workers and change nothing else
TEST(LauncherMachine, UserSignalsArePassedOn) {
  Machine machine;
  machine.on(Begin{});
  EXPECT_EQ(machine.on(PassedSignal{SIGUSR1}), (Actions{SignalWorkers{SIGUSR1}}));
  EXPECT_EQ(machine.state.phase, LauncherPhase::running);
}

// spec: J4 a worker that fails: all workers restart, up to max-restarts
TEST(LauncherMachine, RestartsAllWorkers) {
  Machine machine{.rules = {.workers = 2, .max_restarts = 2}};
  machine.on(Begin{});
  for (int attempt = 1; attempt <= 2; ++attempt) {
    EXPECT_EQ(machine.end(1, kFailed), (Actions{SignalWorkers{SIGTERM}}));
    EXPECT_EQ(machine.end(0, kTermed), (Actions{SweepWorkers{}, StartWorkers{attempt}}));
    EXPECT_EQ(machine.state.phase, LauncherPhase::running);
    EXPECT_TRUE(machine.state.ends.empty());
    EXPECT_EQ(machine.state.restart_cause->local_rank, 1);
    EXPECT_EQ(machine.state.timer, TimePoint::max());
  }
  EXPECT_EQ(machine.end(0, {.code = 5}), (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.end(1, kTermed), (Actions{SweepWorkers{}, Finish{5}}));
}

// spec: J4 a restart that goes well ends with 0
TEST(LauncherMachine, ARestartCanSucceed) {
  Machine machine{.rules = {.workers = 1, .max_restarts = 1}};
  machine.on(Begin{});
  machine.end(0, kFailed);
  EXPECT_EQ(machine.end(0).back(), LauncherAction(Finish{0}));
}

// spec: J4 somebody who stops the job while it is being restarted stops it
TEST(LauncherMachine, AStopSignalCancelsARestart) {
  Machine machine{.rules = {.workers = 2, .max_restarts = 5}};
  machine.on(Begin{});
  machine.end(0, kFailed);
  EXPECT_EQ(machine.on(StopSignal{SIGTERM}), (Actions{SignalWorkers{SIGKILL}}));
  EXPECT_EQ(machine.end(1, kKilled).back(), LauncherAction(Finish{143}));
}

// With several nodes: the epochs say when workers run.
Machine node(LauncherRules rules = {}) {
  rules.by_epoch = true;
  Machine machine{.rules = rules};
  EXPECT_EQ(machine.on(Begin{}), Actions{});
  EXPECT_EQ(machine.state.phase, LauncherPhase::waiting);
  return machine;
}

// spec: J4 a new epoch ends all workers and starts them anew; L2 a node without a seat waits
TEST(LauncherMachine, AnEpochStartsTheWorkers) {
  Machine machine = node({.workers = 2});
  EXPECT_EQ(machine.on(NewEpoch{1, true}), (Actions{StartWorkers{0}}));
  EXPECT_EQ(machine.on(NewEpoch{2, true}), (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.end(0, kTermed), Actions{});
  EXPECT_EQ(machine.on(NewEpoch{3, true}), Actions{}) << "of several the last one counts";
  EXPECT_EQ(machine.end(1, kTermed), (Actions{SweepWorkers{}, StartWorkers{2}}));
  EXPECT_EQ(machine.on(NewEpoch{4, false}), (Actions{SignalWorkers{SIGTERM}}));
  machine.end(0, kTermed);
  EXPECT_EQ(machine.end(1, kTermed), (Actions{SweepWorkers{}}));
  EXPECT_EQ(machine.state.phase, LauncherPhase::waiting);
  EXPECT_EQ(machine.on(NewEpoch{5, true}), (Actions{StartWorkers{4}}));
}

// spec: J4 a failure is told, and the workers run again when the others have agreed
TEST(LauncherMachine, AFailureWaitsForTheNextEpoch) {
  Machine machine = node({.workers = 1});
  machine.on(NewEpoch{1, true});
  EXPECT_EQ(machine.end(0, kFailed),
            (Actions{TellFailed{}, SignalWorkers{SIGTERM}, SweepWorkers{}}));
  EXPECT_EQ(machine.state.phase, LauncherPhase::waiting);
  EXPECT_EQ(machine.on(NewEpoch{2, true}), (Actions{StartWorkers{1}}));
  machine.end(0, kFailed);
  EXPECT_EQ(machine.on(JobEnded{false, 3, "node 0"}), (Actions{Finish{3}}));
}

// spec: J4 a job that has gone well here begins again where another node fails
TEST(LauncherMachine, SuccessHereIsNotTheEnd) {
  Machine machine = node({.workers = 1});
  machine.on(NewEpoch{1, true});
  EXPECT_EQ(machine.end(0), (Actions{TellSucceeded{}}));
  EXPECT_EQ(machine.state.timer, TimePoint::max()) << "the others may work as long as they like";
  EXPECT_EQ(machine.on(NewEpoch{2, true}), (Actions{StartWorkers{1}}));
  machine.end(0);
  EXPECT_EQ(machine.on(JobEnded{true, 0, ""}), (Actions{Finish{0}}));
}

// spec: J3 the failure of another node ends this node's workers, and the exit code is the other's
TEST(LauncherMachine, AnotherNodesFailureEndsOurs) {
  Machine machine = node({.workers = 1});
  machine.on(NewEpoch{1, true});
  EXPECT_EQ(machine.on(JobEnded{false, 9, "node 1"}), (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.on(JobEnded{false, 8, "node 2"}), Actions{});
  EXPECT_EQ(machine.end(0, kTermed), (Actions{SweepWorkers{}, Finish{9}}));
  EXPECT_EQ(machine.state.other_node, "node 1");
}

// spec: J3 the launcher that serves the store stays until the other nodes have gone, but not for
// ever
TEST(LauncherMachine, TheServingLauncherOutlivesTheOthers) {
  for (const bool they_go : {true, false}) {
    Machine machine = node({.workers = 1,
                            .shutdown_timeout = seconds(2),
                            .serves_store = true,
                            .farewell_timeout = seconds(3)});
    machine.on(NewEpoch{1, true});
    machine.end(0);
    EXPECT_EQ(machine.on(JobEnded{true, 0, ""}), Actions{});
    EXPECT_EQ(machine.state.phase, LauncherPhase::lingering);
    EXPECT_EQ(machine.state.timer, machine.now + seconds(5));
    if (!they_go) machine.now += seconds(5);
    EXPECT_EQ(they_go ? machine.on(OthersGone{}) : machine.on(TimerFired{}), (Actions{Finish{0}}));
  }
}

// spec: J3 a signal to one launcher of a fixed set ends the job, and the others hear of it first;
// L2 one of a set that may change leaves, and the job goes on
TEST(LauncherMachine, AStopSignalIsTold) {
  for (const bool may_leave : {false, true}) {
    Machine machine = node({.workers = 1, .may_leave = may_leave});
    machine.on(NewEpoch{1, true});
    EXPECT_EQ(machine.on(StopSignal{SIGTERM}),
              (Actions{TellStopped{may_leave}, SignalWorkers{SIGTERM}}));
    EXPECT_EQ(machine.on(NewEpoch{2, true}), Actions{}) << "nothing starts again";
    if (may_leave) {
      EXPECT_EQ(machine.end(0, kTermed), (Actions{SweepWorkers{}, Finish{143}}));
      continue;
    }
    EXPECT_EQ(machine.end(0, kTermed), (Actions{SweepWorkers{}}));
    EXPECT_EQ(machine.state.timer, machine.now + machine.rules.farewell_timeout);
    EXPECT_EQ(machine.on(JobEnded{false, 143, "node 0"}), (Actions{Finish{143}}));
  }
}

// spec: J3 a signal that all nodes get, and that has ended the job on another one before it comes
// here, takes nothing of the workers' time; a second one kills
TEST(LauncherMachine, AStopSignalAfterTheJobsEndIsTheFirst) {
  Machine machine = node({.workers = 1});
  machine.on(NewEpoch{1, true});
  EXPECT_EQ(machine.on(JobEnded{false, 130, "node 1"}), (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.on(StopSignal{SIGINT}), Actions{});
  EXPECT_EQ(machine.on(StopSignal{SIGINT}), (Actions{SignalWorkers{SIGKILL}}));
  EXPECT_EQ(machine.end(0, kKilled), (Actions{SweepWorkers{}, Finish{130}}));
}

// spec: J3 a signal ends the wait for the first epoch, and for the others' end
TEST(LauncherMachine, AStopSignalEndsTheWaiting) {
  Machine early = node({.workers = 1});
  EXPECT_EQ(early.on(StopSignal{SIGINT}), (Actions{TellStopped{true}, Finish{130}}));
  Machine late = node({.workers = 1});
  late.on(NewEpoch{1, true});
  late.end(0);
  EXPECT_EQ(late.on(StopSignal{SIGINT}), (Actions{TellStopped{false}}));
  EXPECT_EQ(late.on(StopSignal{SIGINT}), (Actions{Finish{130}}));
  EXPECT_EQ(late.on(StopSignal{SIGINT}), Actions{});
}

Machine keeping(LauncherRules rules) {
  rules.keep = rules.by_epoch = true;
  rules.preempt_grace = seconds(20);
  Machine machine{.rules = rules};
  machine.on(Begin{});
  EXPECT_EQ(machine.on(NewEpoch{1, true}), (Actions{StartWorkers{0}}));
  return machine;
}

// spec: L6 a worker's death ends no other; the next epoch replaces it
TEST(LauncherMachine, SurvivorsStay) {
  Machine machine = keeping({.workers = 3});
  EXPECT_EQ(machine.end(1, kKilled), Actions{TellFailed{}});
  EXPECT_EQ(machine.state.phase, LauncherPhase::running);
  EXPECT_EQ(machine.on(NewEpoch{2, true}), (Actions{RepairWorkers{1}}));
  EXPECT_FALSE(machine.state.first_failure.has_value());
  // Those that end well, the replacement too, are no failure.
  EXPECT_EQ(machine.end(0), Actions{});
  EXPECT_EQ(machine.end(1), Actions{});
  EXPECT_EQ(machine.end(2), (Actions{TellSucceeded{}}));
}

// spec: L14.node, L14.end workers of a node that an epoch leaves out give their last commit before
// they are ended, and have a time for that
TEST(LauncherMachine, WorkersThatAreLeftOutHandTheirCommitOver) {
  for (const bool answers : {true, false}) {
    Machine machine = keeping({.workers = 2});
    EXPECT_EQ(machine.on(NewEpoch{2, false}), Actions{AskForCommit{}});
    EXPECT_EQ(machine.on(NewEpoch{3, true}), Actions{}) << "once they have ended";
    EXPECT_EQ(machine.state.timer, machine.now + seconds(10));
    if (answers) {
      EXPECT_EQ(machine.on(CommitHandedOver{}), Actions{SignalWorkers{SIGTERM}});
    } else {
      machine.now = machine.state.timer;
      EXPECT_EQ(machine.on(TimerFired{}), (Actions{GiveCommitUp{}, SignalWorkers{SIGTERM}}));
      EXPECT_EQ(machine.on(CommitHandedOver{}), Actions{}) << "too late";
    }
    EXPECT_EQ(machine.state.timer, machine.now + seconds(30));
    EXPECT_EQ(machine.end(0, kTermed), Actions{});
    EXPECT_EQ(machine.end(1, kTermed), (Actions{SweepWorkers{}, StartWorkers{2}}));
    EXPECT_FALSE(machine.state.first_failure.has_value());
  }
}

// spec: L14.end the end of the job, a signal and the workers' own end do not wait for a commit
TEST(LauncherMachine, NothingElseWaitsForACommit) {
  Machine over = keeping({.workers = 1});
  over.on(NewEpoch{2, false});
  EXPECT_EQ(over.on(JobEnded{true, 0, ""}), Actions{SignalWorkers{SIGTERM}});
  EXPECT_EQ(over.on(CommitHandedOver{}), Actions{});
  Machine stopped = keeping({.workers = 1});
  stopped.on(NewEpoch{2, false});
  EXPECT_EQ(stopped.on(StopSignal{SIGINT}), (Actions{TellStopped{false}, SignalWorkers{SIGKILL}}));
  Machine ended = keeping({.workers = 1});
  ended.on(NewEpoch{2, false});
  EXPECT_EQ(ended.end(0, kFailed), Actions{SweepWorkers{}});
  EXPECT_EQ(ended.state.phase, LauncherPhase::waiting);
  EXPECT_EQ(ended.on(CommitHandedOver{}), Actions{});
  EXPECT_EQ(ended.on(NewEpoch{3, true}), Actions{StartWorkers{2}});
}

// spec: L6 without survivors the workers start anew; J4 and when no restart is left the job ends
TEST(LauncherMachine, NoWorkerStays) {
  Machine machine = keeping({.workers = 2});
  EXPECT_EQ(machine.end(1, kKilled), Actions{TellFailed{}});
  // Rank 0 has ended well, but no rank could give its state.
  EXPECT_EQ(machine.end(0), Actions{SweepWorkers{}});
  EXPECT_EQ(machine.state.phase, LauncherPhase::waiting);
  EXPECT_EQ(machine.on(NewEpoch{2, true}), (Actions{StartWorkers{1}}));
  EXPECT_EQ(machine.end(0, kFailed), Actions{TellFailed{}});
  EXPECT_EQ(machine.on(JobEnded{false, 3, "no restart is left"}),
            (Actions{SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.end(1, kTermed), (Actions{SweepWorkers{}, Finish{3}}));
}

// spec: L6 once training has ended on all ranks a failure ends the job: nothing is trained again
TEST(LauncherMachine, NothingIsRepairedAfterTraining) {
  Machine machine = keeping({.workers = 3});
  EXPECT_EQ(machine.on(AllTrained{}), Actions{});
  EXPECT_EQ(machine.end(0), Actions{});
  EXPECT_EQ(machine.end(1, kFailed), (Actions{TellOver{}, SignalWorkers{SIGTERM}}));
  EXPECT_EQ(machine.on(NewEpoch{2, true}), Actions{TellOver{}}) << "of a node that was lost too";
  EXPECT_EQ(machine.end(2, kTermed), Actions{SweepWorkers{}});
  EXPECT_EQ(machine.on(JobEnded{false, 3, "after training"}), Actions{Finish{3}});

  Machine elsewhere = keeping({.workers = 1});
  elsewhere.on(AllTrained{});
  EXPECT_EQ(elsewhere.on(NewEpoch{2, true}), Actions{TellOver{}});
  EXPECT_EQ(elsewhere.on(JobEnded{false, 1, "node 1 is gone"}), Actions{SignalWorkers{SIGTERM}});

  Machine ended = keeping({.workers = 1});
  ended.on(AllTrained{});
  EXPECT_EQ(ended.end(0), Actions{TellSucceeded{}});
  EXPECT_EQ(ended.on(NewEpoch{2, true}), Actions{TellOver{}});
}

// spec: J4 a program that cannot be executed ends the job at once, however many restarts are left
TEST(LauncherMachine, AProgramThatCannotBeExecutedEndsTheJob) {
  Machine alone{.rules = {.workers = 2, .max_restarts = 5}};
  alone.on(Begin{});
  alone.on(WorkerEnded{0, {.code = 127}, true});
  EXPECT_EQ(alone.end(1, kTermed), (Actions{SweepWorkers{}, Finish{127}}));
  for (const bool keep : {false, true}) {
    Machine node{.rules = {.workers = 2, .by_epoch = true, .keep = keep}};
    node.on(Begin{});
    node.on(NewEpoch{1, true});
    EXPECT_EQ(node.on(WorkerEnded{0, {.code = 126}, true}),
              (Actions{TellOver{}, SignalWorkers{SIGTERM}}));
    EXPECT_EQ(node.end(1, kTermed), Actions{SweepWorkers{}});
    EXPECT_EQ(node.on(JobEnded{false, 126, "another node may say it"}).back(),
              LauncherAction(Finish{126}));
  }
}

// spec: J4 a node that joins a job that others run, and cannot execute the program, leaves alone
// with its own exit code; if it serves the store, once the others have ended
TEST(LauncherMachine, ANodeThatJoinedLaterLeavesAloneWithoutTheProgram) {
  const NewEpoch joined{.number = 4, .seated = true, .only_joined = true, .joined_later = true};
  for (const bool keep : {false, true}) {
    Machine node{.rules = {.workers = 2, .by_epoch = true, .may_leave = true, .keep = keep}};
    node.on(Begin{});
    node.on(joined);
    EXPECT_EQ(node.on(WorkerEnded{0, {.code = 126}, true}),
              (Actions{TellAway{}, SignalWorkers{SIGTERM}}));
    EXPECT_EQ(node.on(NewEpoch{.number = 5, .seated = false}), Actions{});
    EXPECT_EQ(node.end(1, kTermed), (Actions{SweepWorkers{}, Finish{126}}));
  }
  // If all other nodes were killed, no node is left to end the job.
  for (const bool ends : {false, true}) {
    Machine node{.rules = {.workers = 1, .by_epoch = true, .serves_store = true}};
    node.on(Begin{});
    node.on(joined);
    EXPECT_EQ(node.on(WorkerEnded{0, {.code = 127}, true}),
              (Actions{TellAway{}, SignalWorkers{SIGTERM}, SweepWorkers{}}));
    EXPECT_EQ(node.state.phase, LauncherPhase::lingering);
    EXPECT_EQ(node.state.timer, TimePoint::max()) << "the others may work as long as they like";
    if (ends) {
      EXPECT_EQ(node.on(JobEnded{false, 3, ""}), Actions{});
    }
    EXPECT_EQ(node.on(OthersGone{}), Actions{Finish{127}});
  }
}

// spec: L6 a node that joins after training has ended disturbs no other: what was told of the epoch
// before is told again of that one, and the job ends well
TEST(LauncherMachine, ANodeThatJoinsAfterTrainingChangesNothing) {
  const NewEpoch joined{2, true, true};
  Machine machine = keeping({.workers = 1});
  machine.on(AllTrained{});
  EXPECT_EQ(machine.on(joined), Actions{TellTrained{}});
  EXPECT_EQ(machine.state.phase, LauncherPhase::running);
  EXPECT_EQ(machine.end(0), Actions{TellSucceeded{}});
  EXPECT_EQ(machine.on(NewEpoch{3, true, true}), Actions{TellSucceeded{}});
  EXPECT_EQ(machine.on(JobEnded{true, 0, "all workers have ended well"}), Actions{Finish{0}});
}

// spec: L14.node a launcher that stood still gives those whom it would kill the time that they
// missed
TEST(LauncherMachine, ALauncherThatStoodStillKillsNoWorkerForIt) {
  Machine machine{.rules = {.workers = 2, .shutdown_timeout = seconds(7)}};
  machine.on(Begin{});
  machine.end(0, kFailed);
  machine.now += seconds(40);
  EXPECT_EQ(machine.on(TimerFired{}), Actions{});
  EXPECT_EQ(machine.state.timer, machine.now + machine.rules.stood_still);
  machine.now = machine.state.timer;
  EXPECT_EQ(machine.on(TimerFired{}), (Actions{SignalWorkers{SIGKILL}}));
}

// spec: L14.node a launcher whose timers all come late ends its workers nevertheless, and gives the
// next ones the same time
TEST(LauncherMachine, ALauncherThatIsAlwaysLateKillsAtLast) {
  Machine machine{.rules = {.workers = 2, .max_restarts = 1, .shutdown_timeout = seconds(7)}};
  machine.on(Begin{});
  for (int attempt = 0; attempt < 2; ++attempt) {
    machine.end(0, kFailed);
    const auto fires_late = [&] {
      machine.now = machine.state.timer + seconds(2);
      return machine.on(TimerFired{});
    };
    for (int pause = 0; pause < kExcusedPauses; ++pause) EXPECT_EQ(fires_late(), Actions{});
    EXPECT_EQ(fires_late(), (Actions{SignalWorkers{SIGKILL}}));
    machine.end(1, kKilled);
  }
}

// spec: L9 workers leave by themselves after SIGTERM; the others hear of it when they have left;
// after the grace time they are ended
TEST(LauncherMachine, WorkersLeaveBeforeTheNodeIsGivenUp) {
  Machine machine = keeping({.workers = 2, .may_leave = true});
  EXPECT_EQ(machine.on(StopSignal{SIGTERM}), (Actions{TellLeave{}}));
  EXPECT_EQ(machine.state.timer, machine.now + seconds(20));
  EXPECT_EQ(machine.end(0), Actions{});
  EXPECT_EQ(machine.end(1), (Actions{SweepWorkers{}, TellStopped{true}, Finish{143}}));

  Machine slow = keeping({.workers = 1, .may_leave = true});
  slow.on(StopSignal{SIGUSR1});
  slow.now = slow.state.timer;
  EXPECT_EQ(slow.on(TimerFired{}), (Actions{TellStopped{true}, SignalWorkers{SIGTERM}}));
  EXPECT_EQ(slow.end(0, kTermed), (Actions{SweepWorkers{}, Finish{128 + SIGUSR1}}));

  Machine hurried = keeping({.workers = 1, .may_leave = true});
  hurried.on(StopSignal{SIGTERM});
  EXPECT_EQ(hurried.on(StopSignal{SIGTERM}), (Actions{TellStopped{true}, SignalWorkers{SIGKILL}}));
}

// spec: J3 whatever comes in whatever order, every worker that was started is waited for, and there
// is one end
TEST(LauncherMachine, EveryOrderOfEventsEndsOnce) {
  // Each digit of `order` picks the next event; ends of workers that have ended are skipped, as the
  // launcher never sends them.
  const auto [first, step] = testing::stride_of_cases();
  for (int order = first; order < 3 * 8 * 8 * 8 * 8 * 8 * 8; order += step) {
    const bool keep = order % 3 == 2, by_epoch = order % 3 != 0;
    Machine machine{.rules = {.workers = 2,
                              .max_restarts = 1,
                              .by_epoch = by_epoch,
                              .serves_store = by_epoch && order % 2 == 0,
                              .keep = keep,
                              .preempt_grace = seconds(keep ? 30 : 0)}};
    bool alive[2] = {false, false};
    int finishes = 0;
    const auto apply = [&](const Actions& actions) {
      for (const LauncherAction& action : actions) {
        if (std::holds_alternative<StartWorkers>(action)) {
          EXPECT_FALSE(alive[0] || alive[1]) << order;
          alive[0] = alive[1] = true;
        }
        if (std::holds_alternative<RepairWorkers>(action)) {
          EXPECT_TRUE(keep && (alive[0] || alive[1])) << order;
          alive[0] = alive[1] = true;
        }
        if (std::holds_alternative<Finish>(action)) {
          EXPECT_FALSE(alive[0] || alive[1]) << order;
          ++finishes;
        }
      }
    };
    const auto end = [&](int worker, ProcessExit exit) {
      if (!alive[worker]) return;
      alive[worker] = false;
      apply(machine.end(worker, exit));
    };
    std::int64_t epoch = 0;
    apply(machine.on(Begin{}));
    if (by_epoch) apply(machine.on(NewEpoch{++epoch, true}));
    for (int rest = order / 3, i = 0; i < 6; ++i, rest /= 8) {
      switch (rest % 8) {
        case 0: end(0, {}); break;
        case 1: end(1, kFailed); break;
        case 2: apply(machine.on(StopSignal{SIGTERM})); break;
        case 3:
          if (by_epoch) apply(machine.on(JobEnded{false, 1, "other"}));
          break;
        case 4:
          if (by_epoch) apply(machine.on(OthersGone{}));
          break;
        case 5:
          if (by_epoch) apply(machine.on(NewEpoch{++epoch, epoch % 3 != 0}));
          break;
        case 6: apply(machine.on(AllTrained{})); break;
        case 7:
          if (machine.state.timer != TimePoint::max()) machine.now = machine.state.timer;
          apply(machine.on(TimerFired{}));
          break;
      }
    }
    // Then everything ends.
    if (by_epoch) apply(machine.on(JobEnded{true, 0, ""}));
    for (int round = 0; round < 3; ++round) {
      end(0, kTermed);
      end(1, kTermed);
    }
    if (by_epoch) apply(machine.on(OthersGone{}));
    EXPECT_EQ(finishes, 1) << order;
    EXPECT_EQ(machine.state.phase, LauncherPhase::finished) << order;
  }
}

}  // namespace
}  // namespace muster::launch
