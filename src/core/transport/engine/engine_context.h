// SPDX-License-Identifier: BSD-3-Clause
/// State shared by all parts of an engine: the facts of the job, the current pass and the states of
/// the ranks. A struct of data; `engine.h` says which part may call which. Private to `transport/`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/transport/fabric.h"
#include "core/transport/rank_states.h"
#include "core/tunables/tunables_fixed.h"
#include "core/wait/topology.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// The engine's lock: a mutex whose `try_lock` gives way to threads that wait in `lock`: threads
/// that try in a loop do not starve them.
class PassLock {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return waiting_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::atomic<int> waiting_{0};  // a hint, so relaxed: it only makes `try_lock` fail
};

/// State of one pass over the links, for everything that is done in it.
struct PassState {
  TimePoint time{};  ///< when the pass under way, or the last one, began
  /// Messages taken from rings since. After `fixed::kTakenWithoutPass` a pass is due: messages of
  /// other peers must not wait for the watcher.
  int taken_since = 0;
  bool completed = false;  ///< something has ended: sleepers are woken when the lock is released
  bool knows_failure = false;  ///< times matter exactly from then on
  Traffic traffic;
  TimePoint next_duty = TimePoint::min();        ///< of suspects and heartbeats
  TimePoint connector_timer = TimePoint::min();  ///< `Connector::next_timer`

  bool owes_pass() const { return taken_since >= fixed::kTakenWithoutPass; }
  void schedule(TimePoint at) { next_duty = std::min(next_duty, at); }
};

class Link;

/// Events that links and channels report upwards because they concern other parts. All under the
/// engine's lock, none on the path of an ordinary message.
class FailureEvents {
 public:
  /// A transfer needs `rank`, whose death was seen earlier and had no consequence then.
  virtual void on_needed(int rank) = 0;
  /// The members of this channel contradict each other, or its user has failed it.
  virtual void on_channel_failure(std::uint32_t channel, const Status& cause) = 0;
  virtual void on_stream_end(Link& link, const Status& why) = 0;
  /// A stream to the link's peer has been requested, or exists without a request.
  virtual void on_stream_begin(Link& link) = 0;

 protected:
  ~FailureEvents() = default;
};

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

/// How this rank's own part in the job ends.
struct OwnEnd {
  bool closing = false;   ///< from here on this rank declares no other rank dead
  bool unclosed = false;  ///< the close frame says that the groups were not closed
  std::string trouble;    ///< what had gone wrong before it ended unclosed; told before the close
  bool failed = false;    ///< all have been told that this rank has failed: no close frame
};

struct EngineContext {
  EngineContext(const FabricOptions& fabric_options, Connector& fabric_connector)
      : options(fabric_options), connector(fabric_connector), ranks(fabric_options.world_size) {}

  // Set before anything starts, constant from then on.
  const FabricOptions options;
  Connector& connector;
  const ProcessMark mark;
  Fabric* fabric = nullptr;
  std::vector<int> hosts;
  shm::HostRegion* region = nullptr;
  std::vector<int> region_position;  ///< of every rank; -1: not in the region
  Topology topology;                 ///< of this host's ranks
  FailureEvents* failures = nullptr;

  // Under the engine's lock.
  PassState pass;
  RankStates ranks;
  OwnEnd own;

  int rank() const { return options.rank; }
  int world_size() const { return options.world_size; }
  TimePoint now() const { return options.clock->now(); }
  shm::Mailbox& mailbox() const { return connector.mailbox(); }
  /// In a forked child all of this belongs to the parent: nothing may be sent, and the lock may be
  /// held forever.
  bool forked() const { return mark.forked(); }
  bool in_region(int peer) const { return region_position[static_cast<std::size_t>(peer)] >= 0; }
  /// Whether silence alone is a failure at some time. The kernel's word counts in any case.
  bool has_silence_limit() const { return options.heartbeat_limit > Duration::zero(); }
  /// A rank that is silent for this long is suspected; one of this host that the kernel calls
  /// stopped has failed.
  Duration suspicion_limit() const {
    constexpr Duration kLongest = std::chrono::milliseconds(2500);  // limit: within 3 s
    return has_silence_limit() ? std::min(options.heartbeat_limit, kLongest) : kLongest;
  }
  /// Time between two heartbeats.
  Duration heartbeat_interval() const {
    constexpr Duration kShortest = std::chrono::milliseconds(1);  // limit: a load that means none
    return std::max(suspicion_limit() / 10, kShortest);
  }
  /// Arrival time of the current input. Exact once a failure is known, because its order relative
  /// to the failure matters then; otherwise the time at which the last pass began.
  TimePoint time_of_news() const { return pass.knows_failure ? now() : pass.time; }
};

/// The state that a rank of this host publishes in its mailbox.
enum class PeerState : std::uint8_t {
  unknown,  ///< it has no mailbox in this rank's region
  working,
  troubled,       ///< it knows of a failure
  left,           ///< it has ended in good order
  left_unclosed,  ///< it has ended without closing its groups
};

inline bool has_left(PeerState state) {
  return state == PeerState::left || state == PeerState::left_unclosed;
}

inline PeerState peer_state_of(const EngineContext& engine, int rank) {
  if (engine.region == nullptr || !engine.in_region(rank)) return PeerState::unknown;
  const shm::Mailbox& theirs =
      engine.region->mailbox(engine.region_position[static_cast<std::size_t>(rank)]);
  switch (theirs.aborted.load(std::memory_order_acquire)) {
    case shm::Mailbox::kLeft: return PeerState::left;
    case shm::Mailbox::kUnclosed: return PeerState::left_unclosed;
    default: break;
  }
  return theirs.troubled.load(std::memory_order_acquire) != 0 ? PeerState::troubled
                                                              : PeerState::working;
}

}  // namespace muster::transport
