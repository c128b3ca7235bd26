/// What a node says of itself in the value of its hold.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "muster/status.h"

namespace muster::membership {

enum class NodePhase : std::uint8_t {
  waiting = 0,    ///< wants to be in an epoch
  running = 1,    ///< its workers of `epoch` run
  succeeded = 2,  ///< its workers of `epoch` have all ended well
  failed = 3,     ///< a worker of `epoch` has failed: all shall start again, or the job ends
  stopped = 4,    ///< it has failed in a way that no restart mends: the job shall end
  leaving = 5,    ///< it goes in good order, and shall have no seat any more
  finished = 6    ///< its workers of `epoch` have all ended well, and it starts none again
};

struct NodeReport {
  NodePhase phase = NodePhase::waiting;
  std::int64_t epoch = 0;         ///< that the phase belongs to; what is said of another is void
  std::int32_t wanted_slot = -1;  ///< the only one that it may have; -1: any
  std::int32_t exit_code = 0;     ///< failed, stopped: what the job would end with
  std::string host;
  std::string reason;   ///< failed, stopped: a sentence
  std::string details;  ///< the launcher's own words, opaque here
  bool killed = false;  ///< failed: its worker was killed, so no other rank's end is behind that
  /// The epoch whose ranks have all come to the end of training: what is left is to save the
  /// result. 0: none. Said anew in later epochs.
  std::int64_t trained_in = 0;
  /// The numbers of nodes that this one was started with (--nnodes), which are the whole job's; 0:
  /// not said.
  std::int32_t least_nodes = 0;
  std::int32_t most_nodes = 0;
  friend bool operator==(const NodeReport&, const NodeReport&) = default;
};

std::string encode(const NodeReport& report);
Result<NodeReport> decode_report(std::string_view record);

}  // namespace muster::membership
