/// Incoming messages. Private to `transport/`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/transport/channel/match_table.h"
#include "core/transport/channel/transfer_state.h"
#include "core/transport/link/frame.h"

namespace muster::transport {

/// An unmatched message.
struct Envelope {
  MatchKey key;
  Envelope* next_match = nullptr;
  FrameHeader header;
  std::unique_ptr<std::byte[]> payload;  ///< of an eager message
  TransferStateRef local;                ///< a send to oneself, not copied
  std::uint64_t arrival = 0;             ///< order of arrival within the channel
};

/// Destination of the payload that a link is reading: a receive, an envelope, or none (it is
/// dropped).
struct Arrival {
  TransferStateRef receive;
  std::unique_ptr<Envelope> envelope;
  /// The message counts against its sender's credit until it is taken or dropped.
  bool holds_credit = false;
};

}  // namespace muster::transport
