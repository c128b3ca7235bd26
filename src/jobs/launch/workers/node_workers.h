// SPDX-License-Identifier: BSD-3-Clause
/// The worker processes of one node, and the spare processes that may take a worker's place: starts
/// them, tells them of epochs, signals them and reaps them. The launcher decides when.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "jobs/launch/job_history.h"
#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/options.h"
#include "jobs/launch/report.h"
#include "jobs/launch/workers/held_states.h"
#include "jobs/launch/workers/memory_kills.h"
#include "jobs/launch/workers/process.h"
#include "jobs/launch/workers/worker_commands.h"
#include "jobs/launch/workers/worker_notices.h"
#include "jobs/launch/workers/worker_output.h"

namespace muster::launch {

enum class WorkerWakeup : std::uint8_t {
  end,        ///< the worker has ended
  spare_end,  ///< the spare has ended
  words       ///< the worker has said something
};

/// The objects of the launcher that the processes use. All of them must outlive the processes.
struct WorkerSurroundings {
  const RunOptions& options;
  const WorkerCommands& commands;
  const JobHistory& history;
  WorkerOutput& output;
  const sigset_t& signal_mask;
  int secret_file = -1;  ///< a descriptor that workers inherit; -1: none
  /// `fd` is readable when what is named has happened to worker or spare `number`.
  std::function<void(int fd, WorkerWakeup what, int number)> watch;
  std::function<void(int fd)> forget;
};

class NodeWorkers {
 public:
  explicit NodeWorkers(WorkerSurroundings surroundings);

  /// The ranks of the workers that start or are told of an epoch from now on.
  void set_ranks(std::vector<WorkerRanks> ranks) { ranks_ = std::move(ranks); }
  const std::vector<WorkerRanks>& ranks() const { return ranks_; }
  const std::vector<WorkerRecord>& records() const { return records_; }

  /// Starts all of them. `restarts` is TORCHELASTIC_RESTART_COUNT. Once one cannot be started the
  /// others are not tried; returns the ends of both.
  std::vector<WorkerEnded> start_all(int attempt, int restarts);

  struct Repair {
    int kept = 0, from_spares = 0, started = 0;
    std::vector<WorkerEnded> not_started{};
  };
  /// Tells the workers that are left of the epoch that `notice` describes, with each one's ranks,
  /// and replaces the others by spares or by new processes.
  Repair repair(int attempt, const WorkerNotice& notice);

  /// Starts spares until there are as many as the options say.
  void refill_spares(int attempt);
  void end_spares();

  /// The ends of those of `local_ranks` that have ended, ends by a signal first: the other workers
  /// may have failed because of that one.
  std::vector<WorkerEnded> take_ends(std::span<const int> local_ranks);
  void take_spare_end(int number);

  void tell_all(const WorkerNotice& notice);
  /// Takes what the worker has said. True: all ranks have come to the end of training. Memory that
  /// it has given is held for its place.
  bool take_words(int local_rank);
  /// As `take_words`, of all workers.
  bool take_all_words();
  /// The job's state in the memory of this node.
  const HeldStates& states() const { return states_; }
  /// The job has begun an epoch without this node.
  void leave_job();
  /// A worker that had the job's last commit before `leave_job` is asked to give it. False: there
  /// is none.
  bool ask_for_commit();
  /// Whether it has answered since the last call.
  bool take_answer() { return std::exchange(answered_, false); }
  struct LostCommits {
    std::int64_t made = 0;  ///< at least so many; 0: none is lost
    std::int64_t kept = 0;  ///< the first ones, which a rank has
  };
  /// As the workers have said since the last call.
  LostCommits take_lost() { return std::exchange(lost_, {}); }
  /// Why workers cannot go on, as they have said since the last call.
  std::vector<std::pair<int, GroupTrouble>> take_troubles() { return std::exchange(troubles_, {}); }
  /// The newest epoch in which a worker has said since the last call that it ends; 0: none.
  std::int64_t take_ending() { return std::exchange(ending_, 0); }
  /// The local ranks of the workers that stand still (SIGSTOP, a debugger).
  std::set<int> stopped() const;
  /// Ends one worker, which is then replaced like one that has died.
  void kill(int local_rank);
  /// Kills the process groups of all workers, those that have ended too.
  void kill_groups();
  void signal(int signal);
  /// Reaps the workers that have ended. Until then they are zombies, so their pids are not reused.
  void sweep();

 private:
  struct Process {
    pid_t pid = -1;  // and process group; a zombie until `sweep` or `repair`, so not reused
    Descriptor pidfd{};
    bool ended = true;    // its end has been taken, or there is no process
    Descriptor notice{};  // if workers stay
  };
  struct SpareWorker {
    int number = 0;  // in place of a local rank: from the number of workers on
    Process process{};
    WorkerRecord record{};
  };

  Result<Process> start_process(int number, int rank, int attempt, WorkerCommand command,
                                int* exit_code);
  void pass_memories_on(int local_rank, const Process& to) const;
  void put_in_place(int local_rank, Process process);
  void note_worker(int local_rank) const;
  void listen_no_more(Process& worker) const;
  Status start_one(int local_rank, int attempt, int restarts, int* exit_code);
  void start_or_note(int local_rank, int attempt, int restarts, std::vector<WorkerEnded>& failed);
  bool promote_spare(int local_rank, int attempt, const WorkerNotice& notice);
  void tell(const Process& worker, const WorkerNotice& notice) const;

  const WorkerSurroundings around_;
  std::vector<Process> workers_;
  std::vector<WorkerRecord> records_;
  std::vector<WorkerRanks> ranks_;
  std::vector<std::vector<Descriptor>> memories_;  // of the places; they outlive the workers
  HeldStates states_;
  // A commit of workers that an epoch left out, for those that start next, until they have the
  // job's.
  std::vector<Descriptor> kept_commit_;
  int holder_ = -1;  // the place whose worker has it
  bool answered_ = false;
  LostCommits lost_;
  std::int64_t ending_ = 0;
  std::vector<std::pair<int, GroupTrouble>> troubles_;  // by local rank
  std::deque<SpareWorker> spares_;
  MemoryKills memory_kills_;
  int spares_started_ = 0;
};

}  // namespace muster::launch
