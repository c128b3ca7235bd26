/// The orderly end of a communicator: outstanding calls complete, then all members compare how many
/// calls they have made. The first member collects the counts and releases the others.
#pragma once

#include <vector>

#include "muster/collective/collective_queue.h"
#include "muster/collective/driver.h"
#include "muster/collective/point_to_point.h"

namespace muster::collective {

/// Used by the closing thread only.
class Closing {
 public:
  Closing(const GroupContext& group, Driver& driver, CollectiveQueue& queue, PointToPoint& messages)
      : group_(group), driver_(driver), queue_(queue), messages_(messages) {}

  /// Returns the group's failure if there is one, including a member that is missing or has skipped
  /// a call.
  Status run(TimePoint deadline);

 private:
  Status drain(TimePoint deadline);
  Status agree_to_close(TimePoint deadline);
  Status close_as_first(TimePoint deadline);
  Status fail_timed_out(const std::vector<int>& missing, const char* what);
  /// Runs `work(control)` under the drive lock and returns when it is done.
  template <class Work>
  void with_control(Work work) {
    driver_.drive_until([&] { return queue_.with_control(work); }, TimePoint::max());
  }

  const GroupContext& group_;
  Driver& driver_;
  CollectiveQueue& queue_;
  PointToPoint& messages_;
};

}  // namespace muster::collective
