/// The state that a rank of this host publishes in its mailbox. Private to `transport/`.
#pragma once

#include <cstdint>

#include "core/transport/engine/engine_context.h"

namespace muster::transport {

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
