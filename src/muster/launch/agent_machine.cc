#include "muster/launch/agent_machine.h"

#include <signal.h>

namespace muster::launch {
namespace {

struct Step {
  TimePoint now;
  const AgentRules& rules;
  AgentState state;
  std::vector<AgentAction> actions;

  void operator()(const Begin&) { start(); }
  void operator()(const WorkerEnded& event);
  void operator()(const StopSignal& event);
  void operator()(const PassedSignal& event);
  void operator()(const TimerFired&);
  void operator()(const NodeFailed& event);
  void operator()(const NodeEnded&);

  void start();
  void end_workers(int signal);
  void kill_workers();
  void after_last_worker();
  void linger_or_finish();
  void finish();
  bool all_ended() const { return state.ends.size() == static_cast<std::size_t>(rules.workers); }
};

void Step::start() {
  state.phase = AgentPhase::running;
  state.ends.clear();
  state.first_failure.reset();
  state.cause = AgentCause::none;
  state.killed = false;
  state.exit_code = 0;
  state.timer = TimePoint::max();
  actions.push_back(StartWorkers{state.attempt});
}

void Step::end_workers(int signal) {
  state.phase = AgentPhase::ending;
  state.killed = false;
  state.sent_signal = signal;
  state.timer = rules.shutdown_timeout >= TimePoint::max() - now ? TimePoint::max()
                                                                 : now + rules.shutdown_timeout;
  actions.push_back(SignalWorkers{signal});
}

void Step::kill_workers() {
  state.killed = true;
  state.timer = TimePoint::max();
  actions.push_back(SignalWorkers{SIGKILL});
}

void Step::operator()(const WorkerEnded& event) {
  if (state.phase != AgentPhase::running && state.phase != AgentPhase::ending) return;
  const bool asked = state.phase == AgentPhase::ending;
  const bool by_us =
      asked && event.exit.signal != 0 &&
      (event.exit.signal == state.sent_signal || (state.killed && event.exit.signal == SIGKILL));
  state.ends.push_back({event.local_rank, event.exit, asked, by_us});
  // A killed process may be seen to end later than one that failed because of it (its memory is
  // given back first): then it is the cause.
  if (asked && !by_us && event.exit.signal == SIGKILL && state.cause == AgentCause::worker_failed &&
      state.ends[*state.first_failure].exit.signal == 0) {
    state.first_failure = state.ends.size() - 1;
    state.exit_code = event.exit.shell_code();
  }
  if (!event.exit.success() && !asked) {
    state.first_failure = state.ends.size() - 1;
    state.cause = AgentCause::worker_failed;
    state.exit_code = event.exit.shell_code();
    if (state.attempt >= rules.max_restarts) actions.push_back(TellNodesFailed{});
    end_workers(SIGTERM);
  }
  if (all_ended()) after_last_worker();
}

void Step::after_last_worker() {
  state.timer = TimePoint::max();
  if (state.phase == AgentPhase::ending) actions.push_back(SweepWorkers{});
  if (state.cause == AgentCause::worker_failed && state.attempt < rules.max_restarts) {
    ++state.attempt;
    state.restart_cause = state.ends[*state.first_failure];
    start();
    return;
  }
  linger_or_finish();
}

void Step::linger_or_finish() {
  if (state.nodes_ended >= rules.nodes_to_outlive) return finish();
  state.phase = AgentPhase::lingering;
  // While all is well the others may work as long as they like; nodes that fall silent are reported
  // as failed.
  if (state.cause != AgentCause::none)
    state.timer = now + rules.shutdown_timeout + rules.farewell_timeout;
}

void Step::finish() {
  state.phase = AgentPhase::finished;
  state.timer = TimePoint::max();
  actions.push_back(TellNodesEnded{});
  actions.push_back(Finish{state.exit_code});
}

void Step::operator()(const StopSignal& event) {
  switch (state.phase) {
    case AgentPhase::running:
      state.cause = AgentCause::stopped_by_signal;
      state.stop_signal = event.signal;
      state.exit_code = 128 + event.signal;
      actions.push_back(TellNodesFailed{});
      end_workers(event.signal);
      break;
    case AgentPhase::ending:
      // Somebody who asks again does not want to wait; and nothing starts again after it.
      if (state.cause == AgentCause::worker_failed && state.attempt < rules.max_restarts)
        actions.push_back(TellNodesFailed{});
      if (state.cause != AgentCause::other_node_failed) {
        state.cause = AgentCause::stopped_by_signal;
        state.exit_code = 128 + event.signal;
      }
      state.stop_signal = event.signal;
      kill_workers();
      break;
    case AgentPhase::starting:
    case AgentPhase::lingering:
      if (state.cause == AgentCause::none) {
        state.cause = AgentCause::stopped_by_signal;
        state.exit_code = 128 + event.signal;
        actions.push_back(TellNodesFailed{});
      }
      state.stop_signal = event.signal;
      finish();
      break;
    case AgentPhase::finished: break;
  }
}

void Step::operator()(const PassedSignal& event) {
  if (state.phase == AgentPhase::running || state.phase == AgentPhase::ending)
    actions.push_back(SignalWorkers{event.signal});
}

void Step::operator()(const TimerFired&) {
  if (now < state.timer) return;
  if (state.phase == AgentPhase::ending) kill_workers();
  if (state.phase == AgentPhase::lingering) finish();
}

void Step::operator()(const NodeFailed& event) {
  if (state.phase == AgentPhase::finished || state.cause != AgentCause::none) return;
  state.cause = AgentCause::other_node_failed;
  state.other_node = event.text;
  state.exit_code = event.exit_code != 0 ? event.exit_code : 1;
  if (state.phase == AgentPhase::running) return end_workers(SIGTERM);
  linger_or_finish();
}

void Step::operator()(const NodeEnded&) {
  ++state.nodes_ended;
  if (state.phase == AgentPhase::lingering) linger_or_finish();
}

}  // namespace

Decision decide(TimePoint now, const AgentRules& rules, AgentState state, const AgentEvent& event) {
  Step step{now, rules, std::move(state), {}};
  std::visit(step, event);
  return {std::move(step.state), std::move(step.actions)};
}

}  // namespace muster::launch
