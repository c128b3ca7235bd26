/// Finds ranks that are stopped, hung or unreachable. Private to `transport/`; under the engine's
/// lock.
///
/// Within a host each rank's counter grows while its watcher runs, and the next rank of the region
/// looks at it. Between hosts each rank keeps a link to the next rank in the ring of all ranks, and
/// links from which something is wanted are pinged when they are silent.
#pragma once

#include <cstdint>

#include "muster/transport/failure_detector.h"

namespace muster::transport {

class Heartbeats {
 public:
  Heartbeats(EngineContext& engine, Links& links, FailureDetector& detector)
      : engine_(engine), links_(links), detector_(detector) {}

  void start(TimePoint now) { next_ = last_ = now; }
  /// Beats if that is due, and says when it is next.
  TimePoint run(TimePoint now);
  /// Suspends the judgement of others; counted.
  void suspend(bool on) { suspended_ += on ? 1 : -1; }
  /// The nearest rank in the ring of all ranks, `step` after or before this one, that is still
  /// there and on another host; -1 if the nearest is on this host, or there is none.
  int watched_neighbour(int step) const;

 private:
  void beat(TimePoint now);
  int neighbour(int step) const;
  int next_in_region() const;
  void beat_links(TimePoint now, bool judge);
  void beat_mailboxes(TimePoint now, bool judge);
  Status silence_of(int rank, Duration silence, const char* guess) const;

  EngineContext& engine_;
  Links& links_;
  FailureDetector& detector_;
  TimePoint next_ = TimePoint::max();
  TimePoint last_{};
  int suspended_ = 0;
  /// The mailbox that this rank watches.
  struct {
    int position = -1;
    std::uint64_t value = 0;
    TimePoint since{};
  } watched_;
};

}  // namespace muster::transport
