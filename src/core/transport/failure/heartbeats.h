// SPDX-License-Identifier: BSD-3-Clause
/// Finds ranks that are stopped, hung or unreachable. Private to `transport/`; under the engine's
/// lock.
///
/// Within a host each rank's counter grows while its watcher runs, and the next rank of the region
/// looks at it. Between hosts each rank keeps a link to the next rank in the ring of all ranks, and
/// links from which something is wanted are pinged when they are silent.
///
/// A counter that stands still and a ping without an answer are a suspicion: a starved rank looks
/// the same. For a rank of this host the kernel decides: the rank has failed once its process is
/// stopped at several looks, and is waited for while its process runs. Any other rank has failed
/// when it has been silent for `FabricOptions::heartbeat_limit`. Time in which this rank itself had
/// no core is no silence of others.
///
/// A ping may wait for seconds behind what a slow link carries. Its silence counts from the beat at
/// which the peer's kernel has acknowledged the ping, or has stopped acknowledging what is before
/// it. From then on only bytes of the peer are an answer: the kernel of a stopped process goes on
/// acknowledging, each new ping too, until its receive buffers are full.
#pragma once

#include <cstdint>

#include "core/base/time/clock.h"
#include "core/transport/failure/failure_detector.h"

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
  void beat_links(TimePoint now, bool late);
  void beat_mailboxes(TimePoint now, bool late);
  bool has_failed(int rank, PeerSilence& known, Duration silence, bool judge);
  void suspect(int rank, PeerSilence& known, TimePoint since);
  void unsuspect(int rank, PeerSilence& known, TimePoint since);
  void declare(int rank, const PeerSilence& known, TimePoint since, TimePoint now);
  void tell(int rank, TimePoint since, Silence::Step step) const;

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
    TimePoint since{};  // of the first look at this value, or the end of a pause of this rank
    OwnPauses pauses;   // that have moved `since`
    PeerSilence silence;
  } watched_;
};

}  // namespace muster::transport
