/// What the parts of one communicator need from it.
#pragma once

#include <functional>

#include "core/collective/group_context.h"
#include "core/collective/queue/progress.h"
#include "muster/clock.h"

namespace muster::collective {

class Driver : public Progressable {
 public:
  /// Drives all of the communicator's work on this thread until `done()`; returns false if `limit`
  /// passes first.
  virtual bool drive_until(const std::function<bool()>& done, TimePoint limit) = 0;
  /// For a thread that polls between its own work: advances as far as possible. The progress thread
  /// then stays away for `driver_trust`.
  virtual void poll_between_compute() = 0;
  /// This thread is done with work that may have blocked others without driving the communicator.
  virtual void notify_progress_thread() = 0;
};

}  // namespace muster::collective
