/// State shared by all parts of an engine: the facts of the job, the current pass and the states of
/// the ranks. A struct of data; `engine.h` says which part may call which. Private to `transport/`.
#pragma once

#include <string>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/transport/engine/pass_state.h"
#include "core/transport/fabric.h"
#include "core/transport/failure/failure_events.h"
#include "core/transport/rank_states.h"
#include "core/wait/topology.h"

namespace muster::transport {

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
  /// Whether silence alone is a failure at some time. What the kernel says counts in any case.
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

}  // namespace muster::transport
