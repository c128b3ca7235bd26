// SPDX-License-Identifier: BSD-3-Clause
/// The thread that advances started calls for which no thread waits: one per fabric, created on
/// first use, asleep while there is nothing to do or another thread does it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

/// An object with outstanding work. All methods are thread-safe and never block.
class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual std::shared_ptr<transport::Fabric> fabric() = 0;
  /// Advances as far as possible.
  virtual void advance() = 0;
  /// Fails calls that are past their deadline.
  virtual void check_deadlines(TimePoint now) = 0;
  virtual bool busy() = 0;
  /// Whether a thread drives it, by waiting for it or by polling between its own work.
  virtual bool has_driver() = 0;
  /// Only the latter: the progress thread then need not check again at once.
  virtual bool is_polled_between_compute() { return false; }
  virtual TimePoint next_deadline() = 0;
};

class Progress {
 public:
  Progress();
  /// Joins the thread. Nothing may be watched any more.
  ~Progress();

  /// Reserves room to watch one more object, until `leave`. May throw std::bad_alloc.
  void enter();
  void leave();
  /// Starts the thread if it is not running. Code::exhausted if no thread can be created; nothing
  /// is watched then.
  Status prepare();

  /// Advances `work`, which must have entered, until it is not busy, whenever it has no driver.
  /// With `soon` false (a wait is likely to follow at once), the thread may take a millisecond to
  /// notice, and a thread that is awake anyway costs the caller no system call. Does not throw.
  void watch(std::shared_ptr<Progressable> work, bool soon) noexcept;
  /// Releases `work`, which has nothing outstanding any more. Afterwards the thread holds neither
  /// it nor its fabric, so the caller may drop the last reference, and the fabric's close message
  /// has been sent when the caller continues. Blocks for the rest of one pass.
  void forget(const Progressable& work);
  /// The watched objects have changed: a driving thread has left, a deadline is earlier, or
  /// something was aborted.
  void notify();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread
  std::mutex starting_;           // guards the start of `thread_`, once
  std::atomic<bool> running_{false};
  std::thread thread_;
};

}  // namespace muster::collective
