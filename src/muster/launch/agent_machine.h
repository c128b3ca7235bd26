/// What an agent decides: a pure function of the time, its state and what has happened. No
/// processes, no clock, no I/O, so every path is tested without them; `agent.cc` feeds it.
///
///   starting -> running -> (all ended well) -> lingering -> finished
///                 |  a worker fails, a signal asks to stop, another node fails
///                 v
///               ending: SIGTERM (or the signal itself) to all; SIGKILL when the time is up
///                 |     once all have ended:
///                 |-> running again, all workers anew, while restarts are left
///                 `-> lingering -> finished
/// Lingering: the agent that serves the store stays until the other nodes have ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "muster/clock.h"
#include "muster/launch/process.h"

namespace muster::launch {

struct AgentRules {
  int workers = 1;
  int max_restarts = 0;
  Duration shutdown_timeout = std::chrono::seconds(30);
  /// Other nodes that this agent must outlive (it serves the store); 0 for the rest.
  int nodes_to_outlive = 0;
  /// After a failure the other nodes have this long, on top of the shutdown timeout, to say that
  /// they have ended.
  Duration farewell_timeout = std::chrono::seconds(5);
};

enum class AgentPhase : std::uint8_t { starting, running, ending, lingering, finished };
enum class AgentCause : std::uint8_t { none, worker_failed, stopped_by_signal, other_node_failed };

struct WorkerEnd {
  int local_rank = 0;
  ProcessExit exit;
  bool asked = false;  ///< it ended after it had been told to
  bool by_us = false;  ///< by a signal that we had sent
};

struct AgentState {
  AgentPhase phase = AgentPhase::starting;
  int attempt = 0;
  std::vector<WorkerEnd> ends;               ///< of this attempt, in the order seen
  std::optional<WorkerEnd> restart_cause;    ///< the first failure of the attempt before
  std::optional<std::size_t> first_failure;  ///< index into `ends`
  AgentCause cause = AgentCause::none;
  int stop_signal = 0;
  int sent_signal = 0;  ///< what workers were told to end with
  bool killed = false;  ///< SIGKILL has been sent in this phase
  int nodes_ended = 0;
  std::string other_node;  ///< what the node that failed first said
  int exit_code = 0;
  TimePoint timer = TimePoint::max();  ///< when to send TimerFired; max: never
};

// What happens.
struct Begin {};
struct WorkerEnded {
  int local_rank;
  ProcessExit exit;
};
struct StopSignal {  ///< SIGINT, SIGTERM, SIGHUP, SIGQUIT
  int signal;
};
struct PassedSignal {  ///< SIGUSR1, SIGUSR2: for the workers, nothing to us
  int signal;
};
struct TimerFired {};
struct NodeFailed {
  int exit_code;
  std::string text;
};
struct NodeEnded {};
using AgentEvent =
    std::variant<Begin, WorkerEnded, StopSignal, PassedSignal, TimerFired, NodeFailed, NodeEnded>;

// What is to be done, in order.
struct StartWorkers {
  int attempt;
  friend bool operator==(const StartWorkers&, const StartWorkers&) = default;
};
struct SignalWorkers {  ///< to every worker that still runs, and to its process group
  int signal;
  friend bool operator==(const SignalWorkers&, const SignalWorkers&) = default;
};
/// All workers have ended: kill what is left of their process groups.
struct SweepWorkers {
  friend bool operator==(const SweepWorkers&, const SweepWorkers&) = default;
};
struct TellNodesFailed {
  friend bool operator==(const TellNodesFailed&, const TellNodesFailed&) = default;
};
struct TellNodesEnded {
  friend bool operator==(const TellNodesEnded&, const TellNodesEnded&) = default;
};
struct Finish {
  int exit_code;
  friend bool operator==(const Finish&, const Finish&) = default;
};
using AgentAction = std::variant<StartWorkers, SignalWorkers, SweepWorkers, TellNodesFailed,
                                 TellNodesEnded, Finish>;

struct Decision {
  AgentState state;
  std::vector<AgentAction> actions;
};
Decision decide(TimePoint now, const AgentRules& rules, AgentState state, const AgentEvent& event);

}  // namespace muster::launch
