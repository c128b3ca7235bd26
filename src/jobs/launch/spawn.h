// SPDX-License-Identifier: BSD-3-Clause
/// Runs a function in n processes, as torch.multiprocessing.spawn does.
///
/// Bodies return a Status. Nothing here catches exceptions: the caller converts them.
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
  /// How long the others have between SIGTERM and SIGKILL once one has failed. A pause of this
  /// process (SIGSTOP, a suspended machine) gives them that time again.
  Duration shutdown_timeout = std::chrono::seconds(10);
};

/// Running processes. Not thread-safe. The destructor kills (SIGKILL) and reaps those that still
/// run.
class SpawnedProcesses {
 public:
  SpawnedProcesses(SpawnedProcesses&&) noexcept;
  SpawnedProcesses& operator=(SpawnedProcesses&&) noexcept;
  ~SpawnedProcesses();

  /// Waits for all. True: all have succeeded. False: `timeout` (negative: no limit) passed while
  /// none had failed. A failure: one has; the others were ended (SIGTERM, SIGKILL after the
  /// shutdown timeout) and collected. Its text starts with the rank and process that failed first
  /// and gives the body's error, or the signal or exit code. Its code is that of the body's Status
  /// (Code::peer_failed if the process died without one). Its ranks are those of the body's Status,
  /// or that rank. Later calls return the same failure.
  Result<bool> join(Duration timeout = Duration(-1));
  /// Process ids by rank; valid after the processes have ended too.
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
/// keep that thread until the join. A fork copies only the calling thread. Call this before the
/// process has started threads or torch's thread pool: locks held by other threads stay locked in
/// the children.
Result<SpawnedProcesses> start_processes(int n, const SpawnBody& body,
                                         const ProcessOptions& options = {});

/// start_processes and join.
Status spawn_processes(int n, const SpawnBody& body, const ProcessOptions& options = {});

}  // namespace muster::launch
