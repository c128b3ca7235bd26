/// A function in n processes or n threads: J2 of torch.multiprocessing.spawn, as values.
///
/// Bodies return a Status; turning exceptions into one (and back) is the caller's, nothing here
/// catches.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

/// Called with ranks 0 to n - 1.
using SpawnBody = std::function<Status(int rank)>;

struct ProcessOptions {
  /// How long the others have between SIGTERM and SIGKILL once one has failed.
  Duration shutdown_timeout = std::chrono::seconds(10);
};

/// Processes that run. One thread at a time. Destroying it kills (SIGKILL) and collects those that
/// still run.
class SpawnedProcesses {
 public:
  SpawnedProcesses(SpawnedProcesses&&) noexcept;
  SpawnedProcesses& operator=(SpawnedProcesses&&) noexcept;
  ~SpawnedProcesses();

  /// Waits for all. True: all have succeeded. False: `timeout` (negative: no limit) passed while
  /// none had failed. A failure: one has; the others were ended (SIGTERM, SIGKILL after the
  /// shutdown timeout) and collected. Its text starts with the rank and process that failed first
  /// and holds what its body returned, or the signal or exit code; its code is the body's
  /// (Code::peer_failed for a death without words) and its ranks are the body's, or that rank.
  /// Asked again after a failure, it gives the same one.
  Result<bool> join(Duration timeout = Duration(-1));
  /// By rank; stays readable after the end.
  const std::vector<pid_t>& pids() const;
  /// Sends `signal` to all that still run.
  void kill(int signal);

 private:
  friend Result<SpawnedProcesses> start_processes(int, const SpawnBody&, const ProcessOptions&);
  struct Children;
  explicit SpawnedProcesses(std::unique_ptr<Children> children);
  std::unique_ptr<Children> children_;
};

/// Forks n children that run `body(rank)` and end without running this process's exit handlers
/// (standard streams are flushed). A child dies (SIGKILL) when the thread that called this ends, so
/// keep that thread until the join. A fork copies only the calling thread: call this before the
/// process has started threads or torch has computed in parallel, else locks and thread pools are
/// lost in the children.
Result<SpawnedProcesses> start_processes(int n, const SpawnBody& body,
                                         const ProcessOptions& options = {});

/// start_processes and join.
Status spawn_processes(int n, const SpawnBody& body, const ProcessOptions& options = {});

struct ThreadHooks {
  /// Called once, with the rank that failed first and its failure (rank in its text), when that has
  /// been noted: the caller ends what the others wait for, since a thread cannot be ended from
  /// outside. No other failure is noted after it. On the thread that failed, but for one that could
  /// not be started.
  std::function<void(int rank, const Status& failure)> on_first_failure = {};
  /// Called last on each rank's thread, after its failure was noted.
  std::function<void(int rank)> at_end = {};
};

/// Runs `body` in n threads of this process and waits for all. Returns the first failure.
Status spawn_threads(int n, const SpawnBody& body, const ThreadHooks& hooks = {});

}  // namespace muster::launch
