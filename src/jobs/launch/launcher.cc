// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/launcher.h"

#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <deque>
#include <iostream>
#include <limits>

#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "jobs/launch/epoch_words.h"
#include "jobs/launch/job_history.h"
#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/launcher_preparation.h"
#include "jobs/launch/node/epoch_fence.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/report.h"
#include "jobs/launch/wakeup_sources.h"
#include "jobs/launch/workers/event_loop.h"
#include "jobs/launch/workers/node_workers.h"
#include "jobs/launch/workers/stopped_workers.h"
#include "jobs/launch/workers/worker_commands.h"
#include "jobs/launch/workers/worker_notices.h"
#include "jobs/launch/workers/worker_output.h"
#include "jobs/membership/factory.h"

namespace muster::launch {
namespace {

constexpr Duration kFenceLimit = std::chrono::seconds(5);     // for a request to the own store
constexpr Duration kFarewellLimit = std::chrono::seconds(5);  // for the service to take last words

/// Runs on one thread, which blocks only in `wait_and_dispatch`. An event goes to the machine,
/// whose actions are carried out in order; events that they cause wait in `events_` until then.
class NodeLauncher {
 public:
  NodeLauncher(const RunOptions& options, Prepared prepared, SignalWatch& signals);
  /// The exit code.
  Result<int> run(const Program& program, const LogPlace& logs);

 private:
  Status open(const LogPlace& logs);
  Status wait_and_dispatch();
  void happen(const LauncherEvent& event);
  void act(const LauncherAction& action);
  void start_workers(int attempt);
  void repair_workers(int attempt);
  void take_another_port();
  void note_not_started(const std::vector<WorkerEnded>& ends);
  std::string log_file(int local_rank) const;
  void note_end(const WorkerEnded& event);
  void follow(NodeNotice notice);
  void hear(NodeNotice notice);
  void pass_fence();
  void take_leave();
  void begin_leaving();
  void begin_plan(int restarts);
  void tell(membership::NodePhase phase, int exit_code, const std::string& reason,
            bool killed = false);
  void tell_failed();
  void tell_over();
  void tell_away();
  void take_lost();
  void take_troubles();
  void end_stopped();
  std::string node_text() const;
  ReportFacts facts() const;
  const std::string& host() const { return job_.self.host; }
  void report();

  const RunOptions& options_;
  NodeJob job_;
  SignalWatch& signals_;
  WorkerCommands commands_;
  LogPlace logs_;
  std::shared_ptr<const EpochPlan> plan_;         // of the current or next workers
  std::int64_t running_epoch_ = 0;                // of the most recently started workers
  std::int64_t lost_in_epoch_ = 0;                // the last one whose workers said so
  std::shared_ptr<const ReservedPort> reserved_;  // of the workers that run; job_'s: of the next
  JobHistory history_;
  LauncherRules rules_;
  LauncherState state_;
  bool finished_ = false;
  Wakeups wakeups_;
  std::unique_ptr<WorkerOutput> output_;
  std::unique_ptr<NodeMembership> nodes_;
  std::unique_ptr<EpochFence> fence_;    // of the store here, if epochs lie elsewhere
  std::deque<NodeNotice> behind_fence_;  // epochs that begin once it is raised
  Descriptor secret_file_;
  std::unique_ptr<NodeWorkers> workers_;
  StoppedWorkers stopped_{options_.stopped_timeout};
  std::deque<LauncherEvent> events_;
};

NodeLauncher::NodeLauncher(const RunOptions& options, Prepared prepared, SignalWatch& signals)
    : options_(options),
      job_(std::move(prepared.job)),
      signals_(signals),
      commands_(options),
      nodes_(std::move(prepared.nodes)) {
  commands_.job = job_environment(options_, job_, prepared.secret_file);
  secret_file_ = std::move(prepared.secret_file);
  rules_ = launcher_rules(options_, job_, nodes_ != nullptr);
  if (nodes_) return;
  auto alone = std::make_shared<EpochPlan>();
  alone->nodes = {{job_.self, job_.launcher, job_.program_addr, job_.program_port}};
  alone->node = alone->slot = 0;
  plan_ = std::move(alone);
}

Status NodeLauncher::open(const LogPlace& logs) {
  if (Status opened = wakeups_.open(pack(WakeupSource::timer, 0)); !opened) return opened;
  wakeups_.watch(signals_.descriptor(), pack(WakeupSource::signals, 0));
  if (nodes_) wakeups_.watch(nodes_->descriptor(), pack(WakeupSource::nodes, 0));
  logs_ = logs;
  if (nodes_ && job_.store && meets_in_service(options_)) {
    auto store =
        membership::make_agent_membership(job_.store, job_.run_id, kFenceLimit, kFenceLimit);
    if (!store) return store.status();
    auto fence = EpochFence::start(std::move(*store));
    if (!fence) return fence.status();
    fence_ = std::move(*fence);
    wakeups_.watch(fence_->descriptor(), pack(WakeupSource::fence, 0));
  }
  if (Status events = history_.open(options_, job_.run_id, host()); !events) return events;
  auto output = WorkerOutput::make(
      OutputPlan{
          options_.redirects, options_.tee, options_.shown_ranks, logs.base, logs.folders,
          expand_names(options_.line_prefix, {{"role_name", options_.role}, {"hostname", host()}})},
      EventSource{[this](int fd, std::uint64_t token) {
                    wakeups_.watch(fd, pack(WakeupSource::output, token));
                  },
                  [this](int fd) { wakeups_.forget(fd); }});
  if (!output) return output.status();
  output_ = std::move(*output);
  workers_ = std::make_unique<NodeWorkers>(WorkerSurroundings{
      options_, commands_, history_, *output_, signals_.previous_mask(), secret_file_.get(),
      [this](int fd, WorkerWakeup what, int number) {
        wakeups_.watch(fd, pack(source_of(what), static_cast<std::uint64_t>(number)));
      },
      [this](int fd) { wakeups_.forget(fd); }});
  return {};
}

Result<int> NodeLauncher::run(const Program& program, const LogPlace& logs) {
  commands_.set_program(program);
  if (Status opened = open(logs); !opened) return opened;
  happen(Begin{});
  while (!finished_) {
    if (Status waited = wait_and_dispatch(); !waited) return waited;  // the workers end with it
  }
  report();
  // The report also waits for a slow reader, unless a second signal asks to stop.
  while (!output_->drained()) {
    if (!wait_and_dispatch() || !events_.empty()) break;
  }
  if (nodes_) take_leave();
  return state_.exit_code;
}

/// The other nodes hear why this one goes, unless the service does not answer or a signal asks to
/// be quick.
void NodeLauncher::take_leave() {
  wakeups_.arm_timer(deadline_after(steady_clock(), kFarewellLimit));
  while (!nodes_->all_confirmed() && events_.empty()) {
    if (!wait_and_dispatch()) break;
  }
  nodes_->forget_unconfirmed();
}

void NodeLauncher::begin_leaving() {
  output_->say(options_.command + ": " +
               leaving_text(state_.stop_signal, rules_.preempt_grace, nodes_ && rules_.may_leave));
  // The group of the others fails once a worker here has left: they wait for this node's word.
  if (nodes_ && !state_.trained) nodes_->report_ending(running_epoch_);
  workers_->tell_all(leave_notice(running_epoch_, state_.stop_signal));
}

Status NodeLauncher::wait_and_dispatch() {
  epoll_event ready[64];
  const auto count = wakeups_.wait(ready);
  if (!count) return count.status();
  std::vector<int> ended;
  for (int i = 0; i < *count; ++i) {
    const std::uint64_t index = ready[i].data.u64 & 0xffffffff;
    switch (static_cast<WakeupSource>(ready[i].data.u64 >> 32)) {
      case WakeupSource::signals:
        for (int signal : signals_.take()) {
          if (finished_) {
            events_.push_back(StopSignal{signal});
            return {};
          }
          // If workers stay through epochs, SIGUSR1 is a scheduler's notice, as SIGTERM is.
          const bool notice = rules_.keep && signal == SIGUSR1;
          const bool passed = !notice && !options_.stop_signals.contains(signal);
          happen(passed ? LauncherEvent(PassedSignal{signal}) : LauncherEvent(StopSignal{signal}));
        }
        break;
      case WakeupSource::timer:
        wakeups_.take_timer();
        if (finished_) {
          events_.push_back(TimerFired{});
          return {};
        }
        end_stopped();
        happen(TimerFired{});
        break;
      case WakeupSource::nodes:
        for (NodeNotice& notice : nodes_->take()) follow(std::move(notice));
        break;
      case WakeupSource::fence: pass_fence(); break;
      case WakeupSource::worker: ended.push_back(static_cast<int>(index)); break;
      case WakeupSource::spare: workers_->take_spare_end(static_cast<int>(index)); break;
      case WakeupSource::words:
        if (workers_->take_words(static_cast<int>(index))) happen(AllTrained{});
        take_lost();
        take_troubles();
        break;
      case WakeupSource::output: output_->ready(index); break;
    }
  }
  const auto ends = workers_->take_ends(ended);
  if (!ends.empty() && workers_->take_all_words()) happen(AllTrained{});
  take_lost();
  // Before a failure is reported: memory that ended with its process is no state of the job's.
  const HeldState state = workers_->states().newest();
  if (nodes_)
    nodes_->note_state({state.epoch, state.divided, workers_->states().committed(), lost_in_epoch_,
                        workers_->states().kept_in(), running_epoch_,
                        workers_->states().gone_in()});
  take_troubles();
  if (workers_->take_answer()) happen(CommitHandedOver{});
  for (const WorkerEnded& end : ends) happen(end);
  return {};
}

// Actions may cause further events (a worker that cannot be started), which are queued.
void NodeLauncher::happen(const LauncherEvent& event) {
  events_.push_back(event);
  if (events_.size() > 1) return;
  while (!events_.empty()) {
    if (const auto* end = std::get_if<WorkerEnded>(&events_.front())) note_end(*end);
    const bool had_trained = state_.trained;
    Decision decision = decide(steady_clock().now(), rules_, std::move(state_), events_.front());
    state_ = std::move(decision.state);
    // From now on no node may join: there is nothing left to train.
    if (nodes_ && !had_trained && state_.trained && state_.phase == LauncherPhase::running)
      tell(membership::NodePhase::running, 0, {});
    for (const LauncherAction& action : decision.actions) act(action);
    events_.pop_front();
  }
  wakeups_.arm_timer(std::min(state_.timer, stopped_.next()));
}

void NodeLauncher::act(const LauncherAction& action) {
  if (const auto* start = std::get_if<StartWorkers>(&action)) {
    if (start->attempt > 0) workers_->sweep();
    start_workers(start->attempt);
  } else if (const auto* repair = std::get_if<RepairWorkers>(&action)) {
    repair_workers(repair->attempt);
  } else if (std::holds_alternative<TellLeave>(action)) {
    begin_leaving();
  } else if (std::holds_alternative<AskForCommit>(action)) {
    if (!workers_->ask_for_commit()) events_.push_back(CommitHandedOver{});
  } else if (std::holds_alternative<GiveCommitUp>(action)) {
    output_->say(options_.command + ": " + given_up_text(rules_.hand_over_timeout));
  } else if (const auto* signal = std::get_if<SignalWorkers>(&action)) {
    workers_->signal(signal->signal);
  } else if (std::holds_alternative<SweepWorkers>(action)) {
    workers_->kill_groups();
    workers_->sweep();
  } else if (std::holds_alternative<TellFailed>(action)) {
    tell_failed();
  } else if (const auto* stopped = std::get_if<TellStopped>(&action)) {
    tell(stopped->leaving ? membership::NodePhase::leaving : membership::NodePhase::stopped,
         state_.exit_code,
         node_text() + (stopped->leaving ? " leaves" : "") + ": its launcher was stopped by " +
             signal_name(state_.stop_signal));
  } else if (std::holds_alternative<TellOver>(action)) {
    tell_over();
  } else if (std::holds_alternative<TellAway>(action)) {
    tell_away();
  } else if (std::holds_alternative<TellTrained>(action)) {
    tell(membership::NodePhase::running, 0, {});
  } else if (std::holds_alternative<TellSucceeded>(action)) {
    tell(membership::NodePhase::succeeded, 0, {});
  } else {
    finished_ = true;
    workers_->sweep();
    workers_->end_spares();
    output_->stop_waiting();
  }
}

void NodeLauncher::follow(NodeNotice notice) {
  history_.note(notice.failures);
  if (notice.waits_for_state && !finished_) {
    output_->say(options_.command + ": " + notice.waits_for_state->text);
    history_.wait(*notice.waits_for_state);
  }
  if (!notice.event || finished_) return;
  if (workers_->take_all_words()) happen(AllTrained{});
  const auto* next = std::get_if<NewEpoch>(&*notice.event);
  // Workers that only save their result stay with their epoch.
  const bool too_late = state_.trained && next != nullptr && next->only_joined;
  const bool fences = fence_ != nullptr && notice.plan != nullptr && !too_late;
  if (fences) fence_->raise(notice.plan->epoch);
  if (fences && next != nullptr && next->seated)
    return void(behind_fence_.push_back(std::move(notice)));
  // An event that ends workers never waits behind the fence, and drops those that wait there.
  if (!std::holds_alternative<OthersGone>(*notice.event)) behind_fence_.clear();
  hear(std::move(notice));
}

void NodeLauncher::hear(NodeNotice notice) {
  if (notice.plan && notice.plan->node >= 0) plan_ = std::move(notice.plan);
  if (workers_->take_all_words()) happen(AllTrained{});
  // Its workers' words from now on tell of a history that the others have left.
  const auto* next = std::get_if<NewEpoch>(&*notice.event);
  if (next != nullptr && !next->seated) {
    workers_->leave_job();
    // One that is not newer only says that the service is silent for too long: that was told.
    const bool runs = state_.phase == LauncherPhase::running && !state_.trained;
    if (next->number > running_epoch_ && runs)
      output_->say(options_.command + ": " + left_out_text(next->number));
  }
  // It was decided before the others heard that this node leaves.
  if (nodes_ && state_.leaving && next != nullptr && next->seated)
    nodes_->report_ending(next->number);
  happen(*notice.event);
}

/// The store here refuses workers of epochs before that of the notice that have waited for this.
void NodeLauncher::pass_fence() {
  const EpochFence::Raised raised = fence_->take();
  if (!raised.status)
    output_->say(options_.command +
                 ": the store here goes on serving workers of older epochs until it answers: " +
                 raised.status.message());
  while (!finished_ && !behind_fence_.empty() &&
         behind_fence_.front().plan->epoch.number <= raised.epoch) {
    NodeNotice notice = std::move(behind_fence_.front());
    behind_fence_.pop_front();
    hear(std::move(notice));
  }
}

/// Path of a worker's standard error; empty: not kept.
std::string NodeLauncher::log_file(int local_rank) const {
  const auto at = static_cast<std::size_t>(local_rank);
  if (!keeps_errors(options_.redirects, at) && !keeps_errors(options_.tee, at)) return {};
  return logs_.path() + (nodes_ ? "/node_" + std::to_string(plan_->slot) : "") + "/attempt_" +
         std::to_string(workers_->records()[at].attempt) + "/" + std::to_string(local_rank) +
         "/stderr.log";
}

/// Keeps a failure for the reports of all nodes.
void NodeLauncher::note_end(const WorkerEnded& event) {
  if (state_.phase != LauncherPhase::running && state_.phase != LauncherPhase::ending) return;
  const WorkerEnd end = judge_end(state_, event);
  if (!is_failure(end)) return;
  const auto at = static_cast<std::size_t>(end.local_rank);
  const ReportFacts known{options_.command, host(), workers_->ranks(), workers_->records()};
  const FailureNote note = history_.note(
      {running_epoch_, state_.attempt, plan_->slot, workers_->ranks()[at],
       workers_->records()[at].pid, end.exit,
       (nodes_ ? node_text() + ": " : "") + describe_end(end, known), log_file(end.local_rank)});
  if (nodes_) nodes_->add_failure(note);
}

/// This node's name for other nodes.
std::string NodeLauncher::node_text() const {
  return (plan_ && plan_->slot >= 0 ? "node " + std::to_string(plan_->slot) : "a node") + " (" +
         host() + ")";
}

/// Says to the other nodes what has become of the workers. Once training has ended that is said of
/// the present epoch: it may be one that only has more nodes than that of the workers.
void NodeLauncher::tell(membership::NodePhase phase, int exit_code, const std::string& reason,
                        bool killed) {
  nodes_->report(phase, state_.trained ? plan_->epoch.number : running_epoch_, exit_code, reason,
                 killed, state_.trained ? running_epoch_ : 0);
}

void NodeLauncher::tell_failed() {
  tell(membership::NodePhase::failed, state_.exit_code,
       node_text() + ": " + first_failure_line(state_, facts()),
       state_.first_failure && state_.ends[*state_.first_failure].exit.was_killed());
}

void NodeLauncher::tell_over() {
  const std::string why = state_.first_failure
                              ? node_text() + ": " + first_failure_line(state_, facts())
                              : plan_->epoch.reason;
  const std::string text =
      why + (state_.trained ? "; training had ended on all ranks and is not repeated"
                            : "; no restart would help");
  output_->say(options_.command + ": " + text);
  tell(membership::NodePhase::stopped, std::max(1, state_.exit_code), text);
}

/// The others run the program, so what is wrong is wrong with this node.
void NodeLauncher::tell_away() {
  const std::string text = node_text() + ": " + first_failure_line(state_, facts());
  output_->say(options_.command + ": " + text + "; the job goes on without this node");
  tell(membership::NodePhase::leaving, state_.exit_code, text);
}

/// Says it where people and programs look, before training begins again or the job ends.
void NodeLauncher::take_lost() {
  const NodeWorkers::LostCommits lost = workers_->take_lost();
  if (lost.made == 0 || std::exchange(lost_in_epoch_, running_epoch_) == running_epoch_) return;
  const bool fails = options_.on_lost_state == OnLostState::fail;
  const std::string text = loss_text(running_epoch_, lost, fails);
  output_->say(options_.command + ": " + text);
  history_.lose(running_epoch_, lost.made - lost.kept, text);
  if (fails && nodes_) tell(membership::NodePhase::stopped, 1, node_text() + ": " + text);
}

/// Workers that live cannot go on in their epoch: the other nodes hear whom they blame. They wait
/// for the exit of one that has said that it ends.
void NodeLauncher::take_troubles() {
  const std::int64_t ending = workers_->take_ending();
  if (nodes_ && ending > 0 && ending == running_epoch_ && !state_.trained)
    nodes_->report_ending(ending);
  for (const auto& [local_rank, trouble] : workers_->take_troubles()) {
    if (!nodes_ || trouble.epoch != running_epoch_ || state_.phase != LauncherPhase::running ||
        state_.trained)
      continue;
    const int rank = workers_->ranks()[static_cast<std::size_t>(local_rank)].rank;
    const std::string text = "rank " + std::to_string(rank) + ": " + trouble.text;
    log(LogLevel::info,
        "the group of epoch " + std::to_string(trouble.epoch) + " failed for " + text);
    history_.trouble(trouble, rank);
    nodes_->report_trouble(trouble.epoch, slots_of(*plan_, trouble.blamed), text,
                           workers_->states().committed());
  }
}

/// Workers that do not come to the epoch because they stand still.
void NodeLauncher::end_stopped() {
  const TimePoint now = steady_clock().now();
  if (now < stopped_.next()) return;
  const bool runs = state_.phase == LauncherPhase::running;
  for (const int local_rank : stopped_.look(now, runs ? workers_->stopped() : std::set<int>())) {
    const int rank = workers_->ranks()[static_cast<std::size_t>(local_rank)].rank;
    output_->say(options_.command + ": " + stopped_text(rank, options_.stopped_timeout));
    workers_->kill(local_rank);
  }
}

/// The ranks of the workers that are about to start.
void NodeLauncher::begin_plan(int restarts) {
  std::vector<NodeFacts> nodes;
  for (const NodeDetails& node : plan_->nodes) nodes.push_back(node.facts);
  workers_->set_ranks(assign_ranks(nodes, plan_->node));
  const NodeDetails& first = plan_->nodes.front();
  commands_.job.master_addr = first.program_addr;
  commands_.job.master_port = first.program_port;
  if (!first.store_addr.empty())
    commands_.job.agent_store = endpoint_text({first.store_addr, first.store_port});
  commands_.job.epoch = plan_->epoch.number;
  commands_.job.launch = plan_->epoch.launch;
  // Those who join know from the epoch of commits to lose; it may have been decided before a loss.
  const bool is_old = lost_in_epoch_ > plan_->epoch.lost_in;
  commands_.job.committed =
      std::max(workers_->states().committed(), is_old ? 0 : plan_->epoch.committed);
  commands_.job.state_in = plan_->epoch.state_in;
  running_epoch_ = plan_->epoch.number;
  history_.begin(*plan_, restarts, workers_->ranks().front().world_size);
  // All nodes have come, and no other one can take a place.
  if (!epoch_options(options_).wait_for_nodes) job_.door.reset();
  if (!nodes_) return;
  std::vector<std::string> folders = logs_.folders;
  folders.push_back("node_" + std::to_string(plan_->slot));
  output_->set_log_folders(folders);
}

void NodeLauncher::note_not_started(const std::vector<WorkerEnded>& ends) {
  events_.insert(events_.end(), ends.begin(), ends.end());
}

void NodeLauncher::start_workers(int attempt) {
  const std::string words =
      nodes_ ? start_text(plan_->epoch, options_, running_epoch_, rules_.keep) : "";
  if (!words.empty()) {
    output_->say(options_.command + ": " + words);
  } else if (!nodes_ && attempt > 0) {
    output_->say(options_.command + ": " + describe_end(*state_.restart_cause, facts()) +
                 "; restarting all workers (restart " + std::to_string(attempt) + " of " +
                 std::to_string(options_.max_restarts) + ")");
    take_another_port();
  }
  // With several nodes the epochs count the attempts, and only some of them are restarts.
  const int restarts = nodes_ ? plan_->epoch.restarts : attempt;
  begin_plan(restarts);
  note_not_started(workers_->start_all(attempt, restarts));
  if (nodes_ && plan_->node == 0) take_another_port();
  workers_->refill_spares(attempt);
}

void NodeLauncher::repair_workers(int attempt) {
  begin_plan(plan_->epoch.restarts);
  const membership::Epoch& epoch = plan_->epoch;
  WorkerNotice notice = repair_notice(epoch);
  notice.agent_store = commands_.job.agent_store.value_or("");
  notice.master_addr = commands_.job.master_addr;
  notice.master_port = commands_.job.master_port;
  notice.committed = commands_.job.committed;
  const NodeWorkers::Repair done = workers_->repair(attempt, notice);
  stopped_.begin(steady_clock().now());
  note_not_started(done.not_started);
  output_->say(options_.command + ": " + repair_text(epoch, done, options_.max_restarts));
  if (plan_->node == 0) take_another_port();
  workers_->refill_spares(attempt);
}

// Each attempt gets a new port, so that leftovers of the previous one (closing sockets, surviving
// children) do not get in its way. With several nodes the next epoch may begin at any time, so its
// port is reserved in advance.
void NodeLauncher::take_another_port() {
  if (!options_.agent_store) return;
  auto port = ReservedPort::take();
  if (!port)
    return output_->say(options_.command +
                        ": MASTER_PORT stays the same: " + port.status().message());
  reserved_ = std::exchange(job_.reserved, std::make_shared<ReservedPort>(std::move(*port)));
  if (nodes_) return nodes_->set_program_port(job_.reserved->number());
  auto plan = std::make_shared<EpochPlan>(*plan_);
  plan->nodes.front().program_port = job_.reserved->number();
  plan_ = std::move(plan);
}

ReportFacts NodeLauncher::facts() const {
  ReportFacts facts{.command = options_.command,
                    .host = host(),
                    .ranks = workers_->ranks(),
                    .workers = workers_->records(),
                    .log_folder = logs_.path()};
  if (state_.first_failure && output_)
    facts.tail = output_->tail(state_.ends[*state_.first_failure].local_rank);
  if (state_.first_failure) {
    const auto at = static_cast<std::size_t>(state_.ends[*state_.first_failure].local_rank);
    facts.error = read_error_file(workers_->records()[at].error_file).value_or(WorkerError{});
  }
  if (commands_.program().is_python)
    facts.advice = explain_missing_module(facts.tail, commands_.program().pythons, own_program());
  return facts;
}

void NodeLauncher::report() {
  // Show all of the workers' output before the report.
  while (!output_->drained() && events_.empty()) {
    if (!wait_and_dispatch()) break;
  }
  events_.clear();
  history_.end(state_.exit_code, state_.other_node);
  ReportFacts known = facts();
  known.failures = history_.failures();
  if (state_.exit_code != 0) known.traces = find_traces(known.workers, job_.run_id);
  const std::string text = failure_report(state_, known);
  if (!text.empty()) return output_->say(text);
  for (const std::string& loss : history_.losses())
    output_->say(options_.command + ": the job has ended well, but on the way " + loss);
}

Result<int> try_job(const RunOptions& options) {
  auto program = resolve_program(options);
  if (!program) {
    std::cerr << options.command << ": " << program.status().message() << std::endl;
    return 127;
  }
  auto signals = SignalWatch::open(options.stop_signals);
  if (!signals) return signals.status();
  auto prepared = prepare_or_be_stopped(options, *signals);
  if (!prepared) return prepared.status();
  auto logs = log_place(options, prepared->job);
  if (!logs) return logs.status();
  return NodeLauncher(options, std::move(*prepared), *signals).run(*program, *logs);
}

}  // namespace

int run_job(const RunOptions& options) {
  log_by_thread();  // decisions, signals and fencing wait for no disk
  auto code = try_job(options);
  if (code) return *code;
  std::cerr << options.command << ": " << code.status().message() << std::endl;
  return 1;
}

}  // namespace muster::launch
