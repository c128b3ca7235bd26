/// Tracks the caller's buffers that peers may be writing to in the current call, and waits after a
/// failure until the peers have stopped.
#pragma once

#include <cstdint>

#include "core/base/bytes.h"
#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/shm/arena/arena.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/transport/channel/channel.h"
#include "muster/clock.h"

namespace muster::collective::region {

/// After a failure, a member waits this long for each sign of progress from peers that may be
/// storing into its output or reading its input. They make progress with every window.
inline constexpr Duration kQuiesceLimit = std::chrono::milliseconds(50);  // limit: patience

/// Returns the arena that peers can map: the process's own, or another one in tests.
using ArenaOf = shm::Arena* (*)();

class Quiescence {
 public:
  Quiescence(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel,
             ArenaOf arena)
      : segment_(segment), peers_(peers), channel_(channel), arena_(arena) {}

  void begin_call() { exposed_ = Exposed::nothing; }
  /// Peers may store into this member's output from now on.
  void expose_output() { exposed_ = Exposed::output; }
  /// Peers may reclaim the lines of the inputs that this member's table grants to them.
  void expose_inputs() { exposed_ = Exposed::inputs; }

  /// Waits for peers that have begun the call to finish with this member's memory, until all
  /// counters (or that of `only`) have reached the call's end. Gives up when they stop making
  /// progress.
  Task<> quiesce(shm::Counter done, int only = -1);
  /// The same for the exposed memory.
  Task<> quiesce_exposed();
  /// Call after a failure that this member has published. Keeps exposed memory out of use as long
  /// as a peer may store into it: a peer that was stopped in the middle of a store finishes it when
  /// it continues.
  void quarantine(const Args& args) noexcept;
  /// Whether memory is in quarantine, which ends by what peers store in the segment.
  bool watches_writers() const { return watches_writers_; }

 private:
  enum class Exposed : std::uint8_t { nothing, output, inputs };

  bool quiesced(shm::Counter done, int only) const;
  void quarantine(ConstBytes memory, shm::Counter done, int only);

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
  const ArenaOf arena_;
  Exposed exposed_ = Exposed::nothing;
  bool watches_writers_ = false;
};

}  // namespace muster::collective::region
