// SPDX-License-Identifier: BSD-3-Clause
/// The thread that polls MPI for started calls that nobody waits for: one per process, started when
/// first needed, asleep while there is nothing to poll.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/collective/queue/progress.h"
#include "muster/status.h"

namespace muster::carried {

/// Thread-safe.
class CarriedPoller {
 public:
  /// Never destroyed; a forked child has none.
  static CarriedPoller& of_process();

  /// Starts the thread if it is not running. Code::exhausted if none can be started.
  Status prepare();
  /// Advances `work` every `mpi_poll` until it is not busy, whenever it has no driver.
  void watch(std::shared_ptr<collective::Progressable> work);
  /// Returns once the thread no longer holds `work`.
  void forget(const collective::Progressable& work);

 private:
  void run();

  std::mutex lock_;  // guards the following; not held during a pass
  std::condition_variable changed_, passed_;
  std::vector<std::shared_ptr<collective::Progressable>> work_;
  bool running_ = false;
  bool in_pass_ = false;  // the thread advances a copy of `work_`
  std::uint64_t passes_ = 0;
};

}  // namespace muster::carried
