// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/node_workers.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/process/launcher_socket.h"
#include "core/base/process/process_start.h"
#include "core/net/socket_address.h"
#include "jobs/launch/node_numbers.h"

namespace muster::launch {
namespace {

constexpr Duration kKilledLimit = std::chrono::seconds(1);  // limit: patience at the end

std::size_t at(int local_rank) { return static_cast<std::size_t>(local_rank); }

WorkerNotice with_ranks(WorkerNotice notice, const WorkerRanks& ranks) {
  notice.ranks = ranks;
  return notice;
}

}  // namespace

NodeWorkers::NodeWorkers(WorkerSurroundings surroundings)
    : around_(std::move(surroundings)),
      workers_(at(around_.options.workers)),
      records_(at(around_.options.workers)),
      ranks_(at(around_.options.workers)),
      memories_(at(around_.options.workers)),
      states_(around_.options.workers) {}

/// A worker, or a spare if `rank` is -1.
Result<NodeWorkers::Process> NodeWorkers::start_process(int number, int rank, int attempt,
                                                        WorkerCommand command, int* exit_code) {
  auto ends = around_.output.open(number, rank, attempt);
  if (!ends) return ends.status();
  Process worker;
  Descriptor notice;  // of the worker
  if (around_.options.keep_workers) {
    auto channel = make_worker_channel();
    if (!channel) return channel.status();
    notice = std::move(channel->worker);
    worker.notice = std::move(channel->launcher);
    if (rank >= 0) pass_memories_on(number, worker);  // it finds them there when it begins
    command.environment.push_back(std::string(kLauncherSocketVariable) + "=" +
                                  std::to_string(notice.get()));
  }
  command.out = ends->out.get();
  command.err = ends->err.get();
  command.passed_on = {around_.secret_file, notice.get()};
  auto started = start_worker(command, around_.signal_mask, exit_code);
  if (!started) return started.status();
  around_.watch(started->pidfd.get(), rank < 0 ? WorkerWakeup::spare_end : WorkerWakeup::end,
                number);
  worker.pid = started->pid;
  worker.pidfd = std::move(started->pidfd);
  worker.ended = false;
  return worker;
}

Status NodeWorkers::start_one(int local_rank, int attempt, int restarts, int* exit_code) {
  *exit_code = 1;
  const WorkerRanks& ranks = ranks_[at(local_rank)];
  WorkerRecord& record = records_[at(local_rank)];
  record.error_file = around_.history.error_file(local_rank, attempt);
  auto started = start_process(
      local_rank, ranks.rank, attempt,
      around_.commands.command_of(ranks, local_rank, restarts, record.error_file), exit_code);
  if (!started) return started.status();
  record.pid = started->pid;
  put_in_place(local_rank, std::move(*started));
  return {};
}

void NodeWorkers::pass_memories_on(int local_rank, const Process& to) const {
  Status passed = tell_memories(to.notice.get(), memories_[at(local_rank)]);
  // All of them would give the others the same.
  if (passed && local_rank == 0) passed = tell_memories(to.notice.get(), kept_commit_);
  if (!passed && passed.code() != Code::closed)
    around_.output.say(around_.options.command + ": the worker in place " +
                       std::to_string(local_rank) +
                       " does not get its commits: " + passed.message());
}

void NodeWorkers::put_in_place(int local_rank, Process process) {
  Process& worker = workers_[at(local_rank)];
  listen_no_more(worker);
  worker = std::move(process);
  if (!worker.ended) states_.begin(local_rank);
  note_worker(local_rank);
  if (worker.notice) around_.watch(worker.notice.get(), WorkerWakeup::words, local_rank);
}

void NodeWorkers::note_worker(int local_rank) const {
  const std::int64_t pid = workers_[at(local_rank)].pid;
  if (around_.options.numbers && pid > 0)
    around_.options.numbers->put_worker(local_rank, {ranks_[at(local_rank)].rank, pid});
}

void NodeWorkers::listen_no_more(Process& worker) const {
  if (!worker.notice) return;
  around_.forget(worker.notice.get());
  worker.notice.reset();
}

void NodeWorkers::start_or_note(int local_rank, int attempt, int restarts,
                                std::vector<WorkerEnded>& failed) {
  WorkerRecord& record = records_[at(local_rank)];
  record = WorkerRecord{};
  record.started = record.ended = std::chrono::system_clock::now();
  record.attempt = attempt;
  int exit_code = 0;
  const Status started = failed.empty()
                             ? start_one(local_rank, attempt, restarts, &exit_code)
                             : Status(Code::aborted, "another worker could not be started");
  if (started) return;
  record.start_error = started.message();
  failed.push_back(
      {local_rank, failed.empty() ? ProcessExit{.code = exit_code} : ProcessExit{.signal = SIGTERM},
       started.code() == Code::invalid_argument});
}

std::vector<WorkerEnded> NodeWorkers::start_all(int attempt, int restarts) {
  std::vector<WorkerEnded> failed;
  for (int local_rank = 0; local_rank < around_.options.workers; ++local_rank)
    start_or_note(local_rank, attempt, restarts, failed);
  return failed;
}

// The workers that are left hear of the epoch first: they have the most to do.
NodeWorkers::Repair NodeWorkers::repair(int attempt, const WorkerNotice& notice) {
  Repair done;
  for (int local_rank = 0; local_rank < around_.options.workers; ++local_rank) {
    const Process& worker = workers_[at(local_rank)];
    if (worker.ended) continue;
    tell(worker, with_ranks(notice, ranks_[at(local_rank)]));
    note_worker(local_rank);
    ++done.kept;
  }
  for (int local_rank = 0; local_rank < around_.options.workers; ++local_rank) {
    Process& worker = workers_[at(local_rank)];
    if (!worker.ended) continue;
    if (worker.pid > 0) {
      ::killpg(worker.pid, SIGKILL);  // children that it has left
      (void)reap(worker.pid);
      put_in_place(local_rank, {});
    }
    if (promote_spare(local_rank, attempt, notice)) {
      ++done.from_spares;
    } else {
      start_or_note(local_rank, attempt, notice.restarts, done.not_started);
      ++done.started;
    }
  }
  return done;
}

bool NodeWorkers::promote_spare(int local_rank, int attempt, const WorkerNotice& notice) {
  if (spares_.empty()) return false;
  SpareWorker spare = std::move(spares_.front());
  spares_.pop_front();
  const WorkerRanks& ranks = ranks_[at(local_rank)];
  around_.forget(spare.process.pidfd.get());
  around_.watch(spare.process.pidfd.get(), WorkerWakeup::end, local_rank);
  spare.record.attempt = attempt;
  pass_memories_on(local_rank, spare.process);
  tell(spare.process, with_ranks(notice, ranks));
  put_in_place(local_rank, std::move(spare.process));
  records_[at(local_rank)] = std::move(spare.record);
  if (Status renamed = around_.output.rename(spare.number, local_rank, ranks.rank, attempt);
      !renamed)
    around_.output.say(around_.options.command + ": " + renamed.message());
  return true;
}

void NodeWorkers::refill_spares(int attempt) {
  while (spares_.size() < at(around_.options.spares)) {
    SpareWorker spare;
    spare.number = around_.options.workers + spares_started_++;
    spare.record.started = spare.record.ended = std::chrono::system_clock::now();
    spare.record.error_file = around_.history.error_file(spare.number, attempt);
    int exit_code = 0;
    auto started =
        start_process(spare.number, -1, attempt,
                      around_.commands.spare_command(spare.record.error_file), &exit_code);
    if (!started)
      return around_.output.say(around_.options.command +
                                ": no spare process: " + started.status().message());
    spare.record.pid = started->pid;
    spare.process = std::move(*started);
    spares_.push_back(std::move(spare));
  }
}

// The next repair starts another: one that fails by itself would fail again at once.
void NodeWorkers::take_spare_end(int number) {
  const auto found = std::ranges::find(spares_, number, &SpareWorker::number);
  if (found == spares_.end()) return;
  auto exit = look_at_end(found->process.pid);
  if (exit && !*exit) return;
  around_.forget(found->process.pidfd.get());
  (void)reap(found->process.pid);
  const std::string how = exit ? describe(**exit) : "an unknown end";
  spares_.erase(found);
  around_.output.say(around_.options.command + ": a spare process ended with " + how +
                     " before it was needed; it should wait in elastic::run (" +
                     around_.output.tail(number) + ")");
}

void NodeWorkers::end_spares() {
  for (const SpareWorker& spare : spares_) {
    ::killpg(spare.process.pid, SIGKILL);
    around_.forget(spare.process.pidfd.get());
  }
  // None stays behind as a zombie, unless the kernel keeps it (a hung file system).
  const TimePoint limit = steady_clock().now() + kKilledLimit;
  for (const SpareWorker& spare : spares_) {
    pollfd ended{spare.process.pidfd.get(), POLLIN, 0};
    while (::poll(&ended, 1, poll_milliseconds(steady_clock().now(), limit)) < 0 &&
           errno == EINTR) {
    }
    (void)reap(spare.process.pid);
  }
  spares_.clear();
}

std::vector<WorkerEnded> NodeWorkers::take_ends(std::span<const int> local_ranks) {
  std::vector<WorkerEnded> ends;
  for (int local_rank : local_ranks) {
    Process& worker = workers_[at(local_rank)];
    if (worker.ended) continue;
    auto exit = look_at_end(worker.pid);
    if (exit && !*exit) continue;
    around_.forget(worker.pidfd.get());
    worker.ended = true;
    if (around_.options.numbers) around_.options.numbers->end_worker(local_rank);
    states_.end(local_rank);
    records_[at(local_rank)].ended = std::chrono::system_clock::now();
    ends.push_back({local_rank, exit ? **exit : ProcessExit{.code = 1}});
  }
  std::stable_partition(ends.begin(), ends.end(),
                        [](const WorkerEnded& end) { return end.exit.signal != 0; });
  for (const WorkerEnded& end : ends)
    if (!end.exit.success())
      records_[at(end.local_rank)].memory_kill = memory_kills_.take(end.exit.was_killed());
  return ends;
}

void NodeWorkers::tell(const Process& worker, const WorkerNotice& notice) const {
  if (worker.ended || !worker.notice || tell_worker(worker.notice.get(), notice)) return;
  if (errno == EPIPE || errno == ECONNRESET) return;  // its end is noticed by itself
  around_.output.say(around_.options.command + ": process " + std::to_string(worker.pid) +
                     " does not read what the launcher tells it (" + errno_text(errno) +
                     "), and is ended: it would miss an epoch of the job");
  ::kill(worker.pid, SIGKILL);
}

void NodeWorkers::tell_all(const WorkerNotice& notice) {
  for (const Process& worker : workers_) tell(worker, notice);
}

bool NodeWorkers::take_words(int local_rank) {
  Process& worker = workers_[at(local_rank)];
  if (!worker.notice) return false;
  WorkerWords words = launch::take_words(worker.notice.get());
  if (words.lost > 0) lost_ = {words.lost, words.kept};
  states_.take(local_rank, words, around_.options.on_lost_state != OnLostState::begin_again);
  if (states_.newest().epoch > 0) kept_commit_.clear();
  if (words.handed_over) {
    answered_ = true;
    if (!words.handed_over->empty()) {
      kept_commit_ = std::move(*words.handed_over);
      states_.keep();
    }
  }
  if (around_.options.numbers) around_.options.numbers->put_commits(states_.committed());
  ending_ = std::max(ending_, words.ending);
  if (words.trouble) troubles_.emplace_back(local_rank, std::move(*words.trouble));
  if (words.memories) memories_[at(local_rank)] = std::move(*words.memories);
  if (words.memories_missed)
    around_.output.say(around_.options.command + ": rank " +
                       std::to_string(ranks_[at(local_rank)].rank) +
                       " has commits that the launcher cannot hold, as too many files are open "
                       "(ulimit -n); if it dies, what only it has is lost");
  if (words.at_end) listen_no_more(worker);
  return words.trained;
}

bool NodeWorkers::take_all_words() {
  bool trained = false;
  for (int local_rank = 0; local_rank < around_.options.workers; ++local_rank)
    trained = take_words(local_rank) || trained;
  return trained;
}

void NodeWorkers::leave_job() {
  holder_ = states_.holder();
  states_.leave();
}

bool NodeWorkers::ask_for_commit() {
  const int place = std::exchange(holder_, -1);
  if (place < 0) return false;
  const Process& worker = workers_[at(place)];
  WorkerNotice notice;
  notice.kind = WorkerNoticeKind::hand_over;
  notice.reason = "the job goes on without this node";
  return !worker.ended && worker.notice && tell_worker(worker.notice.get(), notice);
}

std::set<int> NodeWorkers::stopped() const {
  std::set<int> ranks;
  for (int local_rank = 0; local_rank < around_.options.workers; ++local_rank) {
    const Process& worker = workers_[at(local_rank)];
    if (worker.ended || worker.pid <= 0) continue;
    const auto start = process_start(worker.pid);  // not reaped, so the pid is its own
    if (start && process_state(worker.pid, *start) == ProcessState::stopped)
      ranks.insert(local_rank);
  }
  return ranks;
}

void NodeWorkers::kill(int local_rank) {
  const Process& worker = workers_[at(local_rank)];
  if (!worker.ended && worker.pid > 0) ::kill(worker.pid, SIGKILL);
}

void NodeWorkers::kill_groups() {
  for (const Process& worker : workers_) {
    if (worker.pid > 0) ::killpg(worker.pid, SIGKILL);
  }
}

void NodeWorkers::signal(int signal) {
  const bool for_worker_only =
      !around_.options.stop_signals.contains(signal) && signal != SIGKILL && signal != SIGTERM;
  for (const Process& worker : workers_) {
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

void NodeWorkers::sweep() {
  for (Process& worker : workers_) {
    if (worker.pid <= 0 || !worker.ended) continue;
    (void)reap(worker.pid);
    listen_no_more(worker);
    worker = Process{};
  }
}

}  // namespace muster::launch
