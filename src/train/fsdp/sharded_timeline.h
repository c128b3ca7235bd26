/// What the units of a sharded model did, in order: for timelines and for tests of overlap.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace muster::parallel {

enum class ShardedEvent {
  gather_started,   ///< whole parameters were asked for, ahead of their use
  gather_finished,  ///< they are there; noticed on a thread of its own
  forward_began,    ///< the parameters are whole, the module's forward follows
  forward_ended,
  backward_began,  ///< the parameters are whole, the unit's part of backward follows
  backward_ended,  ///< all of its gradients are there
  reduced,         ///< this rank has taken its shards of the averages
};

/// The name, as in the enumeration.
const char* name_of(ShardedEvent event);

/// Thread-safe. Grows until it is cleared.
class ShardedTimeline {
 public:
  struct TimelineEntry {
    std::string unit;
    ShardedEvent event;
    std::chrono::steady_clock::time_point at;
  };
  void add(const std::string& unit, ShardedEvent event) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({unit, event, std::chrono::steady_clock::now()});
  }
  std::vector<TimelineEntry> entries() const {
    const std::lock_guard lock(mutex_);
    return entries_;
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<TimelineEntry> entries_;
};

}  // namespace muster::parallel
