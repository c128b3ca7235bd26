#include "muster/launch/agent.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <limits>
#include <sstream>
#include <thread>

#include "muster/base/env.h"
#include "muster/base/socket_address.h"
#include "muster/base/temporary_folder.h"
#include "muster/launch/agent_machine.h"
#include "muster/launch/host.h"
#include "muster/launch/job_history.h"
#include "muster/launch/node_membership.h"
#include "muster/launch/node_rendezvous.h"
#include "muster/launch/python.h"
#include "muster/launch/report.h"
#include "muster/launch/signal_watch.h"
#include "muster/launch/wakeups.h"
#include "muster/launch/worker_commands.h"
#include "muster/launch/worker_output.h"
#include "muster/trace/reader.h"
#include "muster/trace/run_directory.h"

namespace muster::launch {
namespace {

// The upper half of an epoll event's data tells the kind of descriptor.
enum class WakeupSource : std::uint32_t { signals, timer, nodes, worker, output };

std::uint64_t pack(WakeupSource source, std::uint64_t index) {
  return static_cast<std::uint64_t>(source) << 32 | index;
}

struct RunningWorker {
  pid_t pid = -1;
  Descriptor pidfd;
  bool ended = true;
};

/// The result of the preparation, before the first worker starts.
struct Prepared {
  /// For the workers; invalid: they read the secret from where this process did.
  Descriptor secret_file;
  NodeJob job;
  std::unique_ptr<NodeMembership> nodes;  ///< with several nodes
};

/// Where redirected output goes.
struct LogPlace {
  std::string base;  ///< empty: nothing is redirected
  std::vector<std::string> folders;
  std::string path() const {
    std::string whole = base;
    for (const std::string& each : folders) whole += "/" + each;
    return whole;
  }
};

class NodeAgent {
 public:
  NodeAgent(const RunOptions& options, Prepared prepared, SignalWatch& signals);
  /// The exit code.
  Result<int> run(const Program& program, const LogPlace& logs);

 private:
  Status open(const LogPlace& logs);
  void wait_and_dispatch();
  void read_ends(const std::vector<int>& local_ranks);
  void happen(const AgentEvent& event);
  void act(const AgentAction& action);
  void start_workers(int attempt);
  void take_another_port();
  void say_why_again();
  Status start_one(int local_rank, int attempt, int* exit_code);
  void signal_workers(int signal);
  void sweep();
  std::string log_file(int local_rank) const;
  void note_end(const WorkerEnded& event);
  void follow(NodeNews news);
  void begin_plan();
  void tell_failed();
  std::string node_text() const;
  ReportFacts facts() const;
  const std::string& host() const { return job_.self.host; }
  std::string traces() const;
  void report();

  const RunOptions& options_;
  NodeJob job_;
  SignalWatch& signals_;
  WorkerCommands commands_;
  LogPlace logs_;
  std::shared_ptr<const EpochPlan> plan_;         // of the current or next workers
  std::int64_t running_epoch_ = 0;                // of the most recently started workers
  std::shared_ptr<const ReservedPort> reserved_;  // of the workers that run; job_'s: of the next
  JobHistory history_;
  std::vector<WorkerRanks> ranks_;
  AgentRules rules_;
  AgentState state_;
  bool finished_ = false;
  Wakeups wakeups_;
  std::unique_ptr<WorkerOutput> output_;
  std::unique_ptr<NodeMembership> nodes_;
  Descriptor secret_file_;
  std::vector<RunningWorker> workers_;
  std::vector<WorkerRecord> records_;
  std::deque<AgentEvent> events_;
};

NodeAgent::NodeAgent(const RunOptions& options, Prepared prepared, SignalWatch& signals)
    : options_(options),
      job_(std::move(prepared.job)),
      signals_(signals),
      commands_(options),
      nodes_(std::move(prepared.nodes)) {
  commands_.told.run_id = job_.run_id;
  commands_.told.role = options_.role;
  commands_.told.max_restarts = options_.max_restarts;
  if (options_.agent_store)
    commands_.told.agent_store = endpoint_text({job_.master_addr, job_.master_port});
  if (prepared.secret_file)
    commands_.told.secret_place =
        std::to_string(::getpid()) + ":" + std::to_string(prepared.secret_file.get());
  secret_file_ = std::move(prepared.secret_file);
  if (options_.workers > 1)
    commands_.told.threads = std::max(1, allowed_cores() / options_.workers);
  rules_.workers = options_.workers;
  rules_.max_restarts = options_.max_restarts;
  rules_.shutdown_timeout = options_.shutdown_timeout;
  rules_.by_epoch = nodes_ != nullptr;
  // With etcd the store is for the workers of an epoch, whose end is that of their need of it.
  rules_.serves_store =
      nodes_ != nullptr && job_.hosts_store && options_.rendezvous != RendezvousKind::etcd;
  rules_.may_leave = is_elastic(options_) && !rules_.serves_store;
  workers_.resize(static_cast<std::size_t>(options_.workers));
  records_.resize(static_cast<std::size_t>(options_.workers));
  ranks_.resize(static_cast<std::size_t>(options_.workers));
  if (nodes_) return;
  auto alone = std::make_shared<EpochPlan>();
  alone->nodes = {{job_.self, job_.launcher, job_.program_addr, job_.program_port}};
  alone->node = alone->slot = 0;
  plan_ = std::move(alone);
}

Status NodeAgent::open(const LogPlace& logs) {
  if (Status opened = wakeups_.open(pack(WakeupSource::timer, 0)); !opened) return opened;
  wakeups_.watch(signals_.descriptor(), false, pack(WakeupSource::signals, 0));
  if (nodes_) wakeups_.watch(nodes_->descriptor(), false, pack(WakeupSource::nodes, 0));
  logs_ = logs;
  if (Status events = history_.open(options_, job_.run_id, host()); !events) return events;
  output_ = std::make_unique<WorkerOutput>(
      OutputPlan{
          options_.redirects, options_.tee, options_.shown_ranks, logs.base, logs.folders,
          expand_names(options_.line_prefix, {{"role_name", options_.role}, {"hostname", host()}})},
      EventSource{[this](int fd, bool writable, std::uint64_t token) {
                    wakeups_.watch(fd, writable, pack(WakeupSource::output, token));
                  },
                  [this](int fd) { wakeups_.forget(fd); }});
  return {};
}

Result<int> NodeAgent::run(const Program& program, const LogPlace& logs) {
  commands_.set_program(program);
  if (Status opened = open(logs); !opened) return opened;
  happen(Begin{});
  while (!finished_) wait_and_dispatch();
  report();
  // The report also waits for a slow reader, unless a second signal asks to stop.
  while (!output_->drained()) {
    wait_and_dispatch();
    if (!events_.empty()) break;
  }
  return state_.exit_code;
}

void NodeAgent::wait_and_dispatch() {
  epoll_event ready[64];
  const int count = wakeups_.wait(ready);
  std::vector<int> ended;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t index = ready[i].data.u64 & 0xffffffff;
    switch (static_cast<WakeupSource>(ready[i].data.u64 >> 32)) {
      case WakeupSource::signals:
        for (int signal : signals_.take()) {
          if (finished_) return void(events_.push_back(StopSignal{signal}));
          const bool passed = !options_.stop_signals.contains(signal);
          happen(passed ? AgentEvent(PassedSignal{signal}) : AgentEvent(StopSignal{signal}));
        }
        break;
      case WakeupSource::timer:
        wakeups_.take_timer();
        happen(TimerFired{});
        break;
      case WakeupSource::nodes:
        for (NodeNews& news : nodes_->take()) follow(std::move(news));
        break;
      case WakeupSource::worker: ended.push_back(static_cast<int>(index)); break;
      case WakeupSource::output: output_->ready(index); break;
    }
  }
  read_ends(ended);
}

// If several workers are found ended at once, one ended by a signal is the likelier cause: the
// others may have failed because of it.
void NodeAgent::read_ends(const std::vector<int>& local_ranks) {
  std::vector<WorkerEnded> ends;
  for (int local_rank : local_ranks) {
    RunningWorker& worker = workers_[static_cast<std::size_t>(local_rank)];
    if (worker.ended) continue;
    auto exit = look_at_end(worker.pid);
    if (exit && !*exit) continue;
    wakeups_.forget(worker.pidfd.get());
    worker.ended = true;
    records_[static_cast<std::size_t>(local_rank)].ended = std::chrono::system_clock::now();
    ends.push_back({local_rank, exit ? **exit : ProcessExit{.code = 1}});
  }
  std::stable_partition(ends.begin(), ends.end(),
                        [](const WorkerEnded& end) { return end.exit.signal != 0; });
  for (const WorkerEnded& end : ends) happen(end);
}

// Actions may cause further events (a worker that cannot be started), which are queued.
void NodeAgent::happen(const AgentEvent& event) {
  events_.push_back(event);
  if (events_.size() > 1) return;
  while (!events_.empty()) {
    if (const auto* end = std::get_if<WorkerEnded>(&events_.front())) note_end(*end);
    Decision decision = decide(steady_clock().now(), rules_, std::move(state_), events_.front());
    state_ = std::move(decision.state);
    for (const AgentAction& action : decision.actions) act(action);
    events_.pop_front();
  }
  wakeups_.arm_timer(state_.timer);
}

void NodeAgent::act(const AgentAction& action) {
  if (const auto* start = std::get_if<StartWorkers>(&action)) {
    if (start->attempt > 0) sweep();
    start_workers(start->attempt);
  } else if (const auto* signal = std::get_if<SignalWorkers>(&action)) {
    signal_workers(signal->signal);
  } else if (std::holds_alternative<SweepWorkers>(action)) {
    for (const RunningWorker& worker : workers_) {
      if (worker.pid > 0) ::killpg(worker.pid, SIGKILL);
    }
    sweep();
  } else if (std::holds_alternative<TellFailed>(action)) {
    tell_failed();
  } else if (const auto* stopped = std::get_if<TellStopped>(&action)) {
    nodes_->report(
        stopped->leaving ? membership::NodePhase::leaving : membership::NodePhase::stopped,
        running_epoch_, state_.exit_code,
        node_text() + ": its launcher was stopped by " + signal_name(state_.stop_signal));
  } else if (std::holds_alternative<TellSucceeded>(action)) {
    nodes_->report(membership::NodePhase::succeeded, running_epoch_, 0, {});
  } else {
    finished_ = true;
    sweep();
    output_->stop_waiting();
  }
}

void NodeAgent::follow(NodeNews news) {
  history_.note(news.failures);
  if (news.plan && news.plan->node >= 0) plan_ = std::move(news.plan);
  if (news.event && !finished_) happen(*news.event);
}

/// Path of a worker's standard error; empty: not kept.
std::string NodeAgent::log_file(int local_rank) const {
  const auto at = static_cast<std::size_t>(local_rank);
  const auto kept = [&](const std::vector<Streams>& list) {
    return at < list.size() && covers(list[at], Streams::err);
  };
  if (!kept(options_.redirects) && !kept(options_.tee)) return {};
  return logs_.path() + (nodes_ ? "/node_" + std::to_string(plan_->slot) : "") + "/attempt_" +
         std::to_string(state_.attempt) + "/" + std::to_string(local_rank) + "/stderr.log";
}

/// Keeps a failure for the reports of all nodes.
void NodeAgent::note_end(const WorkerEnded& event) {
  if (state_.phase != AgentPhase::running && state_.phase != AgentPhase::ending) return;
  const WorkerEnd end = judge_end(state_, event);
  if (!is_failure(end)) return;
  const auto at = static_cast<std::size_t>(end.local_rank);
  const ReportFacts known{options_.command, host(), ranks_, records_, {}, {}, {}, {}, {}, {}};
  const FailureNote note = history_.note(
      {running_epoch_, state_.attempt, plan_->slot, ranks_[at], records_[at].pid, end.exit,
       (nodes_ ? node_text() + ": " : "") + describe_end(end, known), log_file(end.local_rank)});
  if (nodes_) nodes_->add_failure(note);
}

/// This node's name for other nodes.
std::string NodeAgent::node_text() const {
  return (plan_ && plan_->slot >= 0 ? "node " + std::to_string(plan_->slot) : "a node") + " (" +
         host() + ")";
}

void NodeAgent::tell_failed() {
  nodes_->report(membership::NodePhase::failed, running_epoch_, state_.exit_code,
                 node_text() + ": " + first_failure_line(state_, facts()));
}

/// The ranks of the workers that are about to start.
void NodeAgent::begin_plan() {
  std::vector<NodeFacts> nodes;
  for (const NodeDetails& node : plan_->nodes) nodes.push_back(node.facts);
  ranks_ = assign_ranks(nodes, plan_->node);
  const NodeDetails& first = plan_->nodes.front();
  commands_.told.master_addr = first.program_addr;
  commands_.told.master_port = first.program_port;
  if (!first.store_addr.empty())
    commands_.told.agent_store = endpoint_text({first.store_addr, first.store_port});
  commands_.told.epoch = plan_->epoch.number;
  running_epoch_ = plan_->epoch.number;
  history_.begin(*plan_, ranks_.front().world_size);
  if (!nodes_) return;
  std::vector<std::string> folders = logs_.folders;
  folders.push_back("node_" + std::to_string(plan_->slot));
  output_->set_log_folders(folders);
}

Status NodeAgent::start_one(int local_rank, int attempt, int* exit_code) {
  *exit_code = 1;
  const WorkerRanks& ranks = ranks_[static_cast<std::size_t>(local_rank)];
  auto ends = output_->open(local_rank, ranks.rank, attempt);
  if (!ends) return ends.status();
  // With several nodes the epochs count the attempts, and only some of them are restarts.
  const int restarts = nodes_ ? plan_->epoch.restarts : attempt;
  WorkerCommand command =
      commands_.command_of(ranks, local_rank, restarts, history_.error_file(local_rank, attempt));
  command.out = ends->out.get();
  command.err = ends->err.get();
  command.passed_on = secret_file_.get();
  auto started = start_worker(command, signals_.previous_mask(), exit_code);
  if (!started) return started.status();
  wakeups_.watch(started->pidfd.get(), false,
                 pack(WakeupSource::worker, static_cast<std::uint64_t>(local_rank)));
  RunningWorker& worker = workers_[static_cast<std::size_t>(local_rank)];
  worker = RunningWorker{started->pid, std::move(started->pidfd), false};
  records_[static_cast<std::size_t>(local_rank)].pid = worker.pid;
  return {};
}

void NodeAgent::start_workers(int attempt) {
  if (nodes_) {
    say_why_again();
  } else if (attempt > 0) {
    output_->say(options_.command + ": " + describe_end(*state_.restart_cause, facts()) +
                 "; restarting all workers (restart " + std::to_string(attempt) + " of " +
                 std::to_string(options_.max_restarts) + ")");
    take_another_port();
  }
  begin_plan();
  bool failed = false;
  for (int local_rank = 0; local_rank < options_.workers; ++local_rank) {
    WorkerRecord& record = records_[static_cast<std::size_t>(local_rank)];
    record = WorkerRecord{};
    record.started = record.ended = std::chrono::system_clock::now();
    int exit_code = 0;
    const Status started = failed ? Status(Code::aborted, "another worker could not be started")
                                  : start_one(local_rank, attempt, &exit_code);
    if (started) continue;
    record.start_error = started.message();
    events_.push_back(WorkerEnded{
        local_rank, failed ? ProcessExit{.signal = SIGTERM} : ProcessExit{.code = exit_code}});
    failed = true;
  }
  if (nodes_ && plan_->node == 0) take_another_port();
}

// Each attempt gets a new port, so that leftovers of the previous one (closing sockets, surviving
// children) do not get in its way. With several nodes the next epoch may begin at any time, so its
// port is reserved in advance.
void NodeAgent::take_another_port() {
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

/// Logs why workers start again, in a job of several nodes; nothing the first time.
void NodeAgent::say_why_again() {
  const membership::Epoch& epoch = plan_->epoch;
  if (running_epoch_ == 0) return;
  std::string size =
      std::to_string(plan_->nodes.size()) + (plan_->nodes.size() == 1 ? " node" : " nodes");
  output_->say(options_.command + ": " + epoch.reason + "; starting all workers again on " + size +
               " (epoch " + std::to_string(epoch.number) + ", restart " +
               std::to_string(epoch.restarts) + " of " + std::to_string(options_.max_restarts) +
               ")");
}

void NodeAgent::signal_workers(int signal) {
  const bool for_worker_only =
      !options_.stop_signals.contains(signal) && signal != SIGKILL && signal != SIGTERM;
  for (const RunningWorker& worker : workers_) {
    if (worker.ended) continue;
    if (for_worker_only) {
      ::kill(worker.pid, signal);
      continue;
    }
    ::killpg(worker.pid, signal);
    // A stopped process would not handle the signal.
    ::killpg(worker.pid, SIGCONT);
  }
}

// Reaps ended workers. Until now they stayed zombies, so that their pids were not reused.
void NodeAgent::sweep() {
  for (RunningWorker& worker : workers_) {
    if (worker.pid <= 0 || !worker.ended) continue;
    (void)reap(worker.pid);
    worker = RunningWorker{};
  }
}

ReportFacts NodeAgent::facts() const {
  ReportFacts facts{options_.command, host(), ranks_, records_, {}, {}, logs_.path(), {}, {}, {}};
  if (state_.first_failure && output_)
    facts.tail = output_->tail(state_.ends[*state_.first_failure].local_rank);
  if (state_.first_failure) {
    const std::string path =
        history_.error_file(state_.ends[*state_.first_failure].local_rank, state_.attempt);
    facts.error = read_error_file(path).value_or(WorkerError{});
  }
  if (commands_.program().is_python)
    facts.advice = explain_missing_module(facts.tail, commands_.program().pythons, own_program());
  return facts;
}

/// Finds the traces by a worker's pid, or by the job's name if the worker only started the program
/// that is a rank.
std::string NodeAgent::traces() const {
  const std::string base = trace::run_directory();
  std::int64_t since = std::numeric_limits<std::int64_t>::max();
  for (const WorkerRecord& worker : records_)
    since = std::min<std::int64_t>(since,
                                   worker.started.time_since_epoch() / std::chrono::nanoseconds(1));
  for (const WorkerRecord& worker : records_) {
    if (const auto found = trace::find_job_of(base, worker.pid, since)) return *found;
  }
  if (job_.run_id == "none") return {};  // many jobs have no name
  const auto named = trace::find_job_called(base, job_.run_id, since);
  return named ? *named : std::string();
}

void NodeAgent::report() {
  // Show all of the workers' output before the report.
  while (!output_->drained() && events_.empty()) wait_and_dispatch();
  events_.clear();
  history_.end(state_.exit_code, state_.other_node);
  ReportFacts known = facts();
  known.failures = history_.failures();
  if (state_.exit_code != 0) known.traces = traces();
  const std::string text = failure_report(state_, known);
  if (!text.empty()) output_->say(text);
}

// Creates a temporary folder if the user named none.
Result<LogPlace> log_place(const RunOptions& options, const NodeJob& job) {
  const auto any = [](const std::vector<Streams>& list) {
    return std::any_of(list.begin(), list.end(),
                       [](Streams streams) { return streams != Streams::none; });
  };
  if (!any(options.redirects) && !any(options.tee)) return LogPlace{};
  LogPlace place{options.log_dir.value_or(""), {}};
  std::istringstream id(job.run_id);
  for (std::string part; std::getline(id, part, '/');) {
    if (!part.empty()) place.folders.push_back(part);
  }
  if (place.base.empty()) {
    auto made = make_temporary_folder("muster_");
    if (!made) return made.status();
    place.base = std::move(*made);
    std::cerr << options.command << ": logs are in " << place.base << std::endl;
  }
  return place;
}

Result<Prepared> prepare(const RunOptions& options) {
  auto secret = job_secret(options);
  if (!secret) return secret.status();
  // Workers get the secret in a sealed file. In this environment it would be readable as long as
  // the job runs.
  wipe_env("MUSTER_SECRET");
  auto job = open_job(options, *secret);
  if (!job) return job.status();
  Descriptor secret_file;
  if (secret->kind() == Secret::Kind::given) {
    auto sealed = secret->sealed();
    if (!sealed) return sealed.status();
    secret_file = std::move(*sealed);
  }
  std::unique_ptr<NodeMembership> nodes;
  if (options.nodes > 1) {
    auto joined = join_nodes(options, *job);
    if (!joined) return joined.status();
    nodes = std::move(*joined);
  }
  return Prepared{std::move(secret_file), std::move(*job), std::move(nodes)};
}

/// Runs `prepare` on its own thread. Name lookups, stores and other nodes may block it for the
/// whole join timeout, and none of those waits handles signals. A signal ends this process at once.
Result<Prepared> prepare_or_be_stopped(const RunOptions& options, SignalWatch& signals) {
  Descriptor done(::eventfd(0, EFD_CLOEXEC));
  if (!done) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  std::optional<Result<Prepared>> prepared;
  std::thread preparing([&] {
    prepared = prepare(options);
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t told = ::write(done.get(), &one, sizeof one);
  });
  for (;;) {
    pollfd ready[2] = {{done.get(), POLLIN, 0}, {signals.descriptor(), POLLIN, 0}};
    if (::poll(ready, 2, -1) < 0) continue;
    if (ready[0].revents != 0) break;
    for (int signal : signals.take()) {
      if (!options.stop_signals.contains(signal)) continue;
      std::cerr << options.command << ": stopped by " << signal_name(signal)
                << " while joining the job's store" << std::endl;
      ::_exit(128 + signal);
    }
  }
  preparing.join();
  return std::move(*prepared);
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
  return NodeAgent(options, std::move(*prepared), *signals).run(*program, *logs);
}

}  // namespace

int run_job(const RunOptions& options) {
  auto code = try_job(options);
  if (code) return *code;
  std::cerr << options.command << ": " << code.status().message() << std::endl;
  return 1;
}

}  // namespace muster::launch
