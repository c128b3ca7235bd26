/// How long processes that were told to end have before they are killed. Time in which this process
/// stood still counts for nobody: they may have stood still with it (a suspended machine, Ctrl-Z),
/// or have ended meanwhile, unseen.
#pragma once

#include "core/base/time/own_pauses.h"
#include "muster/clock.h"

namespace muster::launch {

class EndingGrace {
 public:
  EndingGrace(const Clock& clock, Duration time)
      : clock_(clock), time_(time), deadline_(deadline_after(clock, time)) {}

  /// When to ask `is_over`.
  TimePoint deadline() const { return deadline_; }
  /// To be asked after looking at who has ended. After a pause of this process the time begins
  /// anew.
  bool is_over() {
    const TimePoint now = clock_.now();
    if (now < deadline_) return false;
    if (!pauses_.excuse(now - deadline_, kSlack)) return true;
    deadline_ = deadline_after(clock_, time_);
    return false;
  }

 private:
  static constexpr Duration kSlack =
      std::chrono::seconds(1);  // limit: no process that runs is later

  const Clock& clock_;
  const Duration time_;
  TimePoint deadline_;
  OwnPauses pauses_;
};

}  // namespace muster::launch
