// SPDX-License-Identifier: BSD-3-Clause
/// Starting threads of the engine: a thread that the system refuses is a Status and no exception,
/// and it takes no signal of the program's.
#pragma once

#include <signal.h>

#include <functional>
#include <string_view>
#include <thread>

#include "muster/status.h"

namespace muster {

/// Runs `body`, which must not throw, on a new thread that blocks every signal but those that
/// report a fault of its own (SIGSEGV and its like). Code::exhausted names `what` where the system
/// gives no thread; nothing is changed then, the caller's signal mask included.
Result<std::thread> start_thread(std::string_view what, std::function<void()> body);

/// While it lives, a thread that `start_thread` began has the signal mask of the thread that called
/// `start_thread`; other threads keep theirs. For user code that runs on a thread of the engine: a
/// program that it starts inherits the mask, and could not be ended by SIGTERM otherwise.
class ProgramSignals {
 public:
  ProgramSignals();
  ~ProgramSignals();
  ProgramSignals(const ProgramSignals&) = delete;
  ProgramSignals& operator=(const ProgramSignals&) = delete;

 private:
  sigset_t before_;
  bool changed_ = false;
};

/// While it lives, `start_thread` is refused on every thread of the process. For tests.
class NoNewThreads {
 public:
  NoNewThreads();
  ~NoNewThreads();
  NoNewThreads(const NoNewThreads&) = delete;
  NoNewThreads& operator=(const NoNewThreads&) = delete;
};

// Runs a function in n threads of this process, as torch.multiprocessing.spawn does in processes.
//
// Bodies return a Status. Nothing here catches exceptions: the caller converts them.

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
