/// What the parts of one communicator need of it.
#pragma once

#include <functional>

#include "muster/base/clock.h"
#include "muster/collective/group_context.h"
#include "muster/collective/progress.h"

namespace muster::collective {

class Driver : public Progressable {
 public:
  /// Drives all of the communicator's work on this thread until `done()`; false when `limit` has
  /// passed first.
  virtual bool drive_until(const std::function<bool()>& done, TimePoint limit) = 0;
  /// A thread that computes looks in: goes on as far as it can, and need not be helped for a while.
  virtual void poll_between_compute() = 0;
  /// This thread has finished what others may have waited behind without driving the communicator.
  virtual void notify_progress_thread() = 0;
};

}  // namespace muster::collective
