/// Runs a function in n threads of this process, as torch.multiprocessing.spawn does in processes.
///
/// Bodies return a Status. Nothing here catches exceptions: the caller converts them.
#pragma once

#include <functional>

#include "muster/status.h"

namespace muster {

struct ThreadHooks {
  /// Called once, with the rank that failed first and its failure (rank in its text), when that has
  /// been noted: the caller ends what the others wait for, since a thread cannot be ended from
  /// outside. No other failure is noted after it. On the thread that failed, but for one that could
  /// not be started.
  std::function<void(int rank, const Status& failure)> on_first_failure = {};
  /// Called last on each rank's thread, after its failure was noted.
  std::function<void(int rank)> at_end = {};
};

/// Runs `body` in n threads of this process, with ranks 0 to n - 1, and waits for all. Returns the
/// first failure.
Status spawn_threads(int n, const std::function<Status(int rank)>& body,
                     const ThreadHooks& hooks = {});

}  // namespace muster
