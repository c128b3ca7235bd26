/// Which of the caller's memory the peers may be writing to in the call under way, and how a failed
/// call takes it back.
#pragma once

#include <cstdint>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/shm/arena.h"
#include "muster/shm/group_peers.h"
#include "muster/shm/group_segment.h"
#include "muster/transport/channel.h"

namespace muster::collective::region {

/// After a failure a member waits this long for the next sign of peers that may be storing into its
/// output, or reading its input. They give one at every window.
inline constexpr Duration kQuiesceLimit = std::chrono::milliseconds(50);  // limit: patience

/// Finds out whether memory lies in the arena that peers can map: the process's own, another one in
/// tests.
using ArenaOf = shm::Arena* (*)();

class Quiescence {
 public:
  Quiescence(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel,
             ArenaOf arena)
      : segment_(segment), peers_(peers), channel_(channel), arena_(arena) {}

  void begin_call() { exposed_ = Exposed::nothing; }
  /// Peers may store into this member's output from now on.
  void expose_output() { exposed_ = Exposed::output; }
  /// Peers may reclaim the lines of the inputs that are granted to them in this member's table.
  void expose_inputs() { exposed_ = Exposed::inputs; }

  /// Gives peers that have begun the call time to finish with this member's memory, as long as they
  /// get on: until all counters (or that of `only`) have reached the call's end.
  Task<> quiesce(shm::Counter done, int only = -1);
  /// The same for what is exposed.
  Task<> quiesce_exposed();
  /// After a failure that this member has told: keeps what is exposed out of use as long as a peer
  /// may store into it, which was stopped in the middle of a store and finishes it when it goes on.
  void quarantine(const Args& args) noexcept;

 private:
  enum class Exposed : std::uint8_t { nothing, output, inputs };

  bool quiesced(shm::Counter done, int only) const;
  void quarantine(ConstBytes memory, shm::Counter done, int only);

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
  const ArenaOf arena_;
  Exposed exposed_ = Exposed::nothing;
};

}  // namespace muster::collective::region
