// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/launcher_machine.h"

#include <signal.h>

#include <utility>

namespace muster::launch {
namespace {

struct MachineStep {
  TimePoint now;
  const LauncherRules& rules;
  LauncherState state;
  std::vector<LauncherAction> actions;

  void operator()(const Begin&);
  void operator()(const WorkerEnded& event);
  void operator()(const StopSignal& event);
  void operator()(const PassedSignal& event);
  void operator()(const TimerFired&);
  void operator()(const NewEpoch& event);
  void operator()(const JobEnded& event);
  void operator()(const CommitHandedOver&);
  void operator()(const AllTrained&);
  void operator()(const OthersGone&);

  void start(int attempt);
  void end_workers(int signal);
  void kill_workers();
  void ask_to_leave(int signal);
  void ask_for_commit();
  void repair(int attempt);
  void after_training(const NewEpoch& event);
  void after_last_worker();
  void tell_stopped();
  void leave_alone();
  void be_stopped(int signal);
  void wait_for_verdict();
  void linger_or_finish();
  void finish();
  void set_timer(Duration time) {
    state.timer = after(time);
    state.pauses.reset();
  }
  TimePoint after(Duration time) const {
    return time >= TimePoint::max() - now ? TimePoint::max() : now + time;
  }
  bool all_ended() const { return state.ends.size() == static_cast<std::size_t>(rules.workers); }
  bool leaves() const { return rules.may_leave || (!state.begun && !rules.serves_store); }
};

void MachineStep::operator()(const Begin&) {
  if (!rules.by_epoch) return start(0);
  state.phase = LauncherPhase::waiting;
}

void MachineStep::start(int attempt) {
  state.phase = LauncherPhase::running;
  state.attempt = attempt;
  state.next_attempt.reset();
  state.ends.clear();
  state.first_failure.reset();
  state.cause = LauncherCause::none;
  state.killed = state.leaving = state.handing_over = false;
  state.trained = state.unrunnable = false;
  state.exit_code = 0;
  state.timer = TimePoint::max();
  actions.push_back(StartWorkers{attempt});
}

void MachineStep::end_workers(int signal) {
  state.phase = LauncherPhase::ending;
  state.killed = state.handing_over = false;
  state.sent_signal = signal;
  set_timer(rules.shutdown_timeout);
  actions.push_back(SignalWorkers{signal});
}

// With several nodes the others hear of it only when the workers have left: they finish the step.
void MachineStep::ask_to_leave(int signal) {
  be_stopped(signal);
  state.phase = LauncherPhase::ending;
  state.leaving = true;
  set_timer(rules.preempt_grace);
  actions.push_back(TellLeave{});
}

// The job goes on without this node. The others' state may be lost before this node's next workers
// have got it: then this commit is the newest that there is.
void MachineStep::ask_for_commit() {
  state.phase = LauncherPhase::ending;
  state.killed = false;
  state.sent_signal = 0;
  state.handing_over = true;
  set_timer(rules.hand_over_timeout);
  actions.push_back(AskForCommit{});
}

void MachineStep::operator()(const CommitHandedOver&) {
  if (state.phase == LauncherPhase::ending && state.handing_over) end_workers(SIGTERM);
}

void MachineStep::repair(int attempt) {
  state.attempt = attempt;
  state.next_attempt.reset();
  state.ends.clear();
  state.first_failure.reset();
  state.exit_code = 0;
  actions.push_back(RepairWorkers{attempt});
}

void MachineStep::kill_workers() {
  state.killed = true;
  state.handing_over = false;
  state.timer = TimePoint::max();
  actions.push_back(SignalWorkers{SIGKILL});
}

void MachineStep::operator()(const WorkerEnded& event) {
  if (state.phase != LauncherPhase::running && state.phase != LauncherPhase::ending) return;
  const WorkerEnd end = judge_end(state, event);
  const bool asked = end.asked, by_us = end.by_us;
  state.ends.push_back(end);
  // The end of a killed process may be noticed after that of a worker that failed because of it
  // (the kernel frees its memory first). The killed one is then the cause.
  if (asked && !by_us && event.exit.signal == SIGKILL &&
      state.cause == LauncherCause::worker_failed &&
      state.ends[*state.first_failure].exit.signal == 0) {
    state.first_failure = state.ends.size() - 1;
    state.exit_code = event.exit.shell_code();
    if (rules.by_epoch && !state.trained && !state.unrunnable) actions.push_back(TellFailed{});
  }
  if (!event.exit.success() && !asked) {
    if (!state.first_failure) {
      state.first_failure = state.ends.size() - 1;
      state.exit_code = event.exit.shell_code();
    }
    state.unrunnable = state.unrunnable || event.unrunnable;
    const bool hopeless = state.trained || state.unrunnable;
    state.left = rules.by_epoch && state.unrunnable && state.joined_later && !state.trained;
    if (state.left)
      actions.push_back(TellAway{});
    else if (rules.by_epoch && hopeless)
      actions.push_back(TellOver{});
    else if (rules.by_epoch)
      actions.push_back(TellFailed{});
    if (!rules.keep || hopeless) {
      state.cause = LauncherCause::worker_failed;
      end_workers(SIGTERM);
    }
  }
  if (rules.keep && all_ended() && state.phase == LauncherPhase::running && state.first_failure)
    state.cause = LauncherCause::worker_failed;
  if (all_ended()) after_last_worker();
}

void MachineStep::after_last_worker() {
  state.timer = TimePoint::max();
  state.handing_over = false;
  // Processes that failed workers have started and left behind are ended too.
  if (state.phase == LauncherPhase::ending || state.first_failure)
    actions.push_back(SweepWorkers{});
  if (std::exchange(state.leaving, false)) tell_stopped();
  state.restart_cause.reset();
  const bool failed = state.cause == LauncherCause::worker_failed;
  if (failed) state.restart_cause = state.ends[*state.first_failure];
  if (!rules.by_epoch) {
    const bool may_restart = state.attempt < rules.max_restarts && !state.unrunnable;
    if (failed && may_restart) return start(state.attempt + 1);
    return linger_or_finish();
  }
  if (state.left && state.cause != LauncherCause::stopped_by_signal) return leave_alone();
  if (state.cause == LauncherCause::stopped_by_signal && !state.job_over && !leaves())
    return wait_for_verdict();
  if (state.cause == LauncherCause::stopped_by_signal || state.job_over) return linger_or_finish();
  if (state.next_attempt) return start(*state.next_attempt);
  if (state.cause == LauncherCause::none) {
    actions.push_back(TellSucceeded{});
    state.phase = LauncherPhase::lingering;
  } else {
    state.phase = LauncherPhase::waiting;
  }
}

// The other nodes must learn of the stop before this node's silence could count as its death.
void MachineStep::wait_for_verdict() {
  state.phase = LauncherPhase::lingering;
  set_timer(rules.farewell_timeout);
}

// The store here serves the others for as long as their job lasts.
void MachineStep::leave_alone() {
  if (!rules.serves_store || state.job_over) return linger_or_finish();
  state.phase = LauncherPhase::lingering;
}

void MachineStep::linger_or_finish() {
  if (!rules.serves_store || state.others_gone) return finish();
  state.phase = LauncherPhase::lingering;
  // Do not wait for silent nodes.
  set_timer(rules.shutdown_timeout);
  if (state.timer != TimePoint::max()) state.timer += rules.farewell_timeout;
}

void MachineStep::finish() {
  state.phase = LauncherPhase::finished;
  state.timer = TimePoint::max();
  actions.push_back(Finish{state.exit_code});
}

void MachineStep::be_stopped(int signal) {
  state.cause = LauncherCause::stopped_by_signal;
  state.stop_signal = signal;
  state.exit_code = 128 + signal;
  state.next_attempt.reset();
}

void MachineStep::tell_stopped() {
  if (rules.by_epoch && !state.job_over) actions.push_back(TellStopped{leaves()});
}

void MachineStep::operator()(const StopSignal& event) {
  switch (state.phase) {
    case LauncherPhase::running:
      if (rules.keep && rules.preempt_grace > Duration::zero() &&
          (event.signal == SIGTERM || event.signal == SIGUSR1))
        return ask_to_leave(event.signal);
      be_stopped(event.signal);
      tell_stopped();
      end_workers(event.signal);
      break;
    case LauncherPhase::ending:
      // The job may end here because a signal that all nodes get came earlier to another one.
      if (state.cause == LauncherCause::other_node_failed && state.stop_signal == 0) {
        state.stop_signal = event.signal;
        break;
      }
      // A second signal kills without waiting, and nothing restarts after it.
      if (state.cause != LauncherCause::stopped_by_signal || state.leaving) tell_stopped();
      state.leaving = false;
      if (state.cause != LauncherCause::other_node_failed) be_stopped(event.signal);
      state.stop_signal = event.signal;
      kill_workers();
      break;
    case LauncherPhase::starting:
    case LauncherPhase::waiting:
    case LauncherPhase::lingering: {
      const bool again = state.cause == LauncherCause::stopped_by_signal;
      const bool tell = !again && !state.job_over && rules.by_epoch;
      if (!state.job_over) be_stopped(event.signal);
      state.stop_signal = event.signal;
      if (!tell) return finish();
      tell_stopped();
      if (leaves() || !state.begun) return finish();
      wait_for_verdict();
      break;
    }
    case LauncherPhase::finished: break;
  }
}

void MachineStep::operator()(const PassedSignal& event) {
  if (state.phase == LauncherPhase::running || state.phase == LauncherPhase::ending)
    actions.push_back(SignalWorkers{event.signal});
}

void MachineStep::operator()(const TimerFired&) {
  if (now < state.timer) return;
  if (state.pauses.excuse(now - state.timer, rules.stood_still)) {
    state.timer = after(rules.stood_still);
    return;
  }
  if (state.phase == LauncherPhase::ending && state.leaving) {
    state.leaving = false;
    tell_stopped();
    end_workers(SIGTERM);
  } else if (state.phase == LauncherPhase::ending && state.handing_over) {
    actions.push_back(GiveCommitUp{});
    end_workers(SIGTERM);
  } else if (state.phase == LauncherPhase::ending) {
    kill_workers();
  } else {
    finish();
  }
}

void MachineStep::operator()(const NewEpoch& event) {
  if (state.phase == LauncherPhase::finished || state.job_over || state.left ||
      state.cause == LauncherCause::stopped_by_signal)
    return;
  state.begun = true;
  state.joined_later = event.joined_later;
  if (state.trained) return after_training(event);
  const int attempt = static_cast<int>(event.number) - 1;
  state.next_attempt.reset();
  if (event.seated) state.next_attempt = attempt;
  if (state.phase == LauncherPhase::running && rules.keep && event.seated) return repair(attempt);
  if (state.phase == LauncherPhase::running) {
    state.cause = LauncherCause::new_epoch;
    return rules.keep ? ask_for_commit() : end_workers(SIGTERM);
  }
  if (state.phase == LauncherPhase::ending) return;
  if (event.seated) return start(attempt);
  state.phase = LauncherPhase::waiting;
  state.cause = LauncherCause::none;
}

void MachineStep::operator()(const JobEnded& event) {
  if (state.phase == LauncherPhase::finished || state.job_over) return;
  state.job_over = true;
  state.next_attempt.reset();
  if (state.first_failure && state.cause == LauncherCause::none)
    state.cause = LauncherCause::worker_failed;
  if (!event.succeeded && !state.left && state.cause != LauncherCause::stopped_by_signal) {
    state.exit_code = event.exit_code != 0 ? event.exit_code : 1;
    if (state.cause != LauncherCause::worker_failed) {
      state.cause = LauncherCause::other_node_failed;
      state.other_node = event.reason;
    }
  }
  if (state.phase == LauncherPhase::running || state.handing_over) return end_workers(SIGTERM);
  if (state.phase != LauncherPhase::ending) linger_or_finish();
}

/// The node that joined came too late: the workers here only save their result. This node repeats
/// for the new epoch the phase that it reported for the one before.
void MachineStep::after_training(const NewEpoch& event) {
  if (!event.only_joined) return actions.push_back(TellOver{});
  if (state.phase == LauncherPhase::running) return actions.push_back(TellTrained{});
  if (state.phase == LauncherPhase::lingering && state.cause == LauncherCause::none)
    actions.push_back(TellSucceeded{});
}

void MachineStep::operator()(const AllTrained&) { state.trained = rules.keep; }

void MachineStep::operator()(const OthersGone&) {
  state.others_gone = true;
  if (state.phase == LauncherPhase::lingering && (state.job_over || state.left)) finish();
}

}  // namespace

WorkerEnd judge_end(const LauncherState& state, const WorkerEnded& event) {
  const bool asked = state.phase == LauncherPhase::ending;
  const bool by_us =
      asked && event.exit.signal != 0 &&
      (event.exit.signal == state.sent_signal || (state.killed && event.exit.signal == SIGKILL));
  return {event.local_rank, event.exit, asked, by_us};
}

Decision decide(TimePoint now, const LauncherRules& rules, LauncherState state,
                const LauncherEvent& event) {
  MachineStep step{now, rules, std::move(state), {}};
  std::visit(step, event);
  return {std::move(step.state), std::move(step.actions)};
}

}  // namespace muster::launch
