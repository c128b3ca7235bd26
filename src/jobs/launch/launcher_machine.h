// SPDX-License-Identifier: BSD-3-Clause
/// The launcher's decisions: a pure function of the time, the state and an event. No processes, no
/// clock, no I/O, so every path is tested without them; `launcher.cc` feeds it events.
///
///   starting -> running -> (all ended well) -> lingering -> finished
///                 |  a worker fails, a signal asks to stop, another node fails, a new epoch begins
///                 v
///               ending: SIGTERM (or the signal itself) to all; SIGKILL when the time is up
///                 |     once all have ended:
///                 |-> running again, all workers anew, while restarts are left
///                 |-> waiting for the epoch in which they run again, with several nodes
///                 `-> lingering -> finished
/// If workers stay (`LauncherRules::keep`), a failure leaves the phase as it is: the next epoch
/// replaces the workers that have ended, and the others go on. Those of a node that an epoch leaves
/// out give their last commit to the launcher first (`ending`). Once the workers have come to the
/// end of training there is nothing to repair: a failure then ends the job, and a node that joins
/// changes nothing. A program that cannot be executed ends the job as well, unless other nodes ran
/// it before this one joined: then this node leaves alone. With several nodes an epoch of the job
/// starts the workers, not this launcher. After a failure it waits for the next epoch or the end of
/// the job. Lingering: the job continues on other nodes, or this launcher serves the store and
/// stays until the other nodes have ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/time/clock.h"
#include "jobs/launch/workers/process.h"
#include "muster/clock.h"

namespace muster::launch {

struct LauncherRules {
  int workers = 1;
  int max_restarts = 0;  ///< on a single node; with several nodes the epochs count restarts
  Duration shutdown_timeout = std::chrono::seconds(30);
  /// With several nodes: workers run when an epoch has a seat for them.
  bool by_epoch = false;
  /// This node serves the store, so it must stay until the other nodes have ended.
  bool serves_store = false;
  /// The job may go on without this node once it has been told to stop.
  bool may_leave = false;
  /// Workers that are left after a failure stay; the next epoch replaces those that have ended.
  bool keep = false;
  /// With `keep`: how long workers have to leave by themselves when the node is given up.
  Duration preempt_grace = Duration::zero();
  /// With `keep`: how long workers have to give their last commit to the launcher when an epoch
  /// leaves the node out.
  Duration hand_over_timeout = std::chrono::seconds(10);  // limit: for a copy in memory
  /// How long the other nodes have to answer, in addition to the shutdown timeout.
  Duration farewell_timeout = std::chrono::seconds(5);
  /// A timer that comes later than this says that the launcher stood still, and its workers perhaps
  /// with it: what it would end gets this time again (`core/base/time/clock.h`).
  Duration stood_still = std::chrono::seconds(1);
};

enum class LauncherPhase : std::uint8_t { starting, waiting, running, ending, lingering, finished };
enum class LauncherCause : std::uint8_t {
  none,
  worker_failed,
  stopped_by_signal,
  other_node_failed,
  new_epoch
};

struct WorkerEnd {
  int local_rank = 0;
  ProcessExit exit;
  bool asked = false;  ///< the launcher had told it to end
  bool by_us = false;  ///< ended by a signal that the launcher sent
};

struct LauncherState {
  LauncherPhase phase = LauncherPhase::starting;
  int attempt = 0;                           ///< with several nodes: the epoch's number - 1
  std::vector<WorkerEnd> ends;               ///< of this attempt, in the order seen
  std::optional<WorkerEnd> restart_cause;    ///< the first failure of the attempt before
  std::optional<std::size_t> first_failure;  ///< index into `ends`
  LauncherCause cause = LauncherCause::none;
  int stop_signal = 0;
  int sent_signal = 0;  ///< the signal that workers were told to end with
  bool killed = false;  ///< SIGKILL has been sent in this phase
  /// Workers were told to leave; the others hear of it when they have ended.
  bool leaving = false;
  bool handing_over = false;  ///< a worker was asked for its last commit; then all are ended
  /// An attempt to begin when the workers of the one before have ended.
  std::optional<int> next_attempt;
  bool unrunnable = false;    ///< of this attempt: the program cannot be executed
  bool joined_later = false;  ///< another node ran the program before this one got its seat
  bool left = false;          ///< it joined later, and has told the others to go on without it
  bool trained = false;  ///< with `LauncherRules::keep`: all ranks have come to the end of training
  bool begun = false;    ///< the job has had an epoch
  bool job_over = false;     ///< nothing will start any more
  bool others_gone = false;  ///< no other node is left
  std::string other_node;    ///< the message of the node that failed first
  int exit_code = 0;
  TimePoint timer = TimePoint::max();  ///< when to send TimerFired; max: never
  OwnPauses pauses{};                  ///< that have put the timer off
};

// Events.
struct Begin {};
struct WorkerEnded {
  int local_rank;
  ProcessExit exit;
  bool unrunnable = false;  ///< it never ran: its program cannot be executed
};
struct StopSignal {  ///< SIGINT, SIGTERM, SIGHUP, SIGQUIT
  int signal;
};
struct PassedSignal {  ///< SIGUSR1, SIGUSR2: forwarded to the workers only
  int signal;
};
struct TimerFired {};
/// A new epoch of the job, in which this node may or may not have a seat.
struct NewEpoch {
  std::int64_t number;
  bool seated;
  /// It differs from the one before by nodes that have joined: none was lost and no worker failed.
  bool only_joined = false;
  bool joined_later = false;  ///< another node ran the program before this one got its seat
};
/// The job has ended, or the service that knows is unreachable.
struct JobEnded {
  bool succeeded;
  int exit_code;
  std::string reason;
};
/// The worker that was asked for its last commit has given it; or there is none to ask.
struct CommitHandedOver {};
/// A worker has said that all ranks have come to the end of training.
struct AllTrained {};
struct OthersGone {};
using LauncherEvent = std::variant<Begin, WorkerEnded, StopSignal, PassedSignal, TimerFired,
                                   NewEpoch, JobEnded, CommitHandedOver, AllTrained, OthersGone>;

// Actions, to be carried out in order.
struct StartWorkers {
  int attempt;
  friend bool operator==(const StartWorkers&, const StartWorkers&) = default;
};
/// The workers that have ended start anew, and the others are told of the epoch.
struct RepairWorkers {
  int attempt;
  friend bool operator==(const RepairWorkers&, const RepairWorkers&) = default;
};
/// The workers shall leave after their next commit.
struct TellLeave {
  friend bool operator==(const TellLeave&, const TellLeave&) = default;
};
/// A worker shall give its last commit, upon which there is a CommitHandedOver.
struct AskForCommit {
  friend bool operator==(const AskForCommit&, const AskForCommit&) = default;
};
/// The worker has not given it in time: people hear that it ends with the worker.
struct GiveCommitUp {
  friend bool operator==(const GiveCommitUp&, const GiveCommitUp&) = default;
};
struct SignalWorkers {  ///< to every running worker and its process group
  int signal;
  friend bool operator==(const SignalWorkers&, const SignalWorkers&) = default;
};
/// All workers have ended: kill what is left of their process groups.
struct SweepWorkers {
  friend bool operator==(const SweepWorkers&, const SweepWorkers&) = default;
};
/// A worker has failed.
struct TellFailed {
  friend bool operator==(const TellFailed&, const TellFailed&) = default;
};
/// This node was told to stop: the job shall go on without it, or end.
struct TellStopped {
  bool leaving;
  friend bool operator==(const TellStopped&, const TellStopped&) = default;
};
/// A failure that no restart mends: of a program that cannot be executed, or after training, here
/// or elsewhere. The job shall end with it.
struct TellOver {
  friend bool operator==(const TellOver&, const TellOver&) = default;
};
/// This node cannot execute the program, which other nodes run: the job shall go on without it.
struct TellAway {
  friend bool operator==(const TellAway&, const TellAway&) = default;
};
/// All ranks had come to the end of training before the present epoch began.
struct TellTrained {
  friend bool operator==(const TellTrained&, const TellTrained&) = default;
};
struct TellSucceeded {
  friend bool operator==(const TellSucceeded&, const TellSucceeded&) = default;
};
struct Finish {
  int exit_code;
  friend bool operator==(const Finish&, const Finish&) = default;
};
using LauncherAction =
    std::variant<StartWorkers, RepairWorkers, TellLeave, AskForCommit, GiveCommitUp, SignalWorkers,
                 SweepWorkers, TellFailed, TellStopped, TellOver, TellAway, TellTrained,
                 TellSucceeded, Finish>;

/// Classifies the end of a worker, in the state before `decide` receives it.
WorkerEnd judge_end(const LauncherState& state, const WorkerEnded& event);
/// Whether it is a failure of the worker's own.
inline bool is_failure(const WorkerEnd& end) {
  return !end.exit.success() && (!end.asked || (end.exit.signal != 0 && !end.by_us));
}

struct Decision {
  LauncherState state;
  std::vector<LauncherAction> actions;
};
Decision decide(TimePoint now, const LauncherRules& rules, LauncherState state,
                const LauncherEvent& event);

}  // namespace muster::launch
