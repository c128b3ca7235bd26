/// What one pass over the links and everything done in it share. Private to `transport/`; under the
/// engine's lock.
#pragma once

#include <algorithm>

#include "core/transport/fabric.h"
#include "muster/clock.h"

namespace muster::transport {

struct PassState {
  /// Messages that may be taken from a ring without a pass. Then one is due: what others send must
  /// not wait for the watcher.
  static constexpr int kTakenWithoutPass = 128;  // limit: other peers wait so long

  TimePoint time{};        ///< when the pass under way, or the last one, began
  int taken_since = 0;     ///< messages taken since without a pass
  bool completed = false;  ///< something has ended: sleepers are woken when the lock is released
  bool knows_failure = false;  ///< times matter exactly from then on
  Traffic traffic;
  TimePoint next_duty = TimePoint::min();        ///< of suspects and heartbeats
  TimePoint connector_timer = TimePoint::min();  ///< `Connector::next_timer`

  bool owes_pass() const { return taken_since >= kTakenWithoutPass; }
  void schedule(TimePoint at) { next_duty = std::min(next_duty, at); }
};

}  // namespace muster::transport
