/// The thread that advances what was started and that nobody waits for: one per fabric, made when
/// first needed, asleep whenever there is nothing to do or somebody else does it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

/// Something with work under way. All calls are thread-safe and never block.
class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual std::shared_ptr<transport::Fabric> fabric() = 0;
  /// Goes on as far as it can.
  virtual void advance() = 0;
  /// Fails what is past its deadline.
  virtual void check_deadlines(TimePoint now) = 0;
  virtual bool busy() = 0;
  /// Whether some thread drives it, by waiting for it or between its own work.
  virtual bool has_driver() = 0;
  /// The latter alone: then there is time until the next look.
  virtual bool is_polled_between_compute() { return false; }
  virtual TimePoint next_deadline() = 0;
};

class Progress {
 public:
  Progress();
  /// Joins the thread; nothing may be watched any more.
  ~Progress();

  /// Makes room to watch one more, until `leave`. May throw for want of memory.
  void enter();
  void leave();
  /// Starts the thread where it does not run yet. Code::exhausted where there is none to be had:
  /// then nothing is watched.
  Status prepare();

  /// Advances `work`, one of those that have entered, until it is not busy, whenever nobody attends
  /// to it. With `soon` false (a wait is likely to follow at once) the thread may take a
  /// millisecond to notice, and a thread that is awake anyway costs the caller no system call.
  /// Throws nothing.
  void watch(std::shared_ptr<Progressable> work, bool soon) noexcept;
  /// Lets go of `work`, which has nothing under way any more. Afterwards the thread holds neither
  /// it nor its fabric: whoever drops them last is the caller, and the goodbye of the fabric is
  /// said before the caller goes on. Blocks for the rest of one pass.
  void forget(const Progressable& work);
  /// What is watched has changed: a driving thread has left, a deadline is nearer, something was
  /// aborted.
  void notify();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::mutex starting_;
  std::atomic<bool> running_{false};
  std::thread thread_;
};

}  // namespace muster::collective
