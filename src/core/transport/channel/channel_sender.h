/// The sending half of a channel. Private to `transport/`; under the engine's lock.
#pragma once

#include "core/transport/channel/channel_core.h"
#include "core/transport/channel/channel_receiver.h"

namespace muster::transport {

/// The header of a small message.
FrameHeader eager_header(std::uint32_t channel, std::uint64_t tag, std::size_t bytes,
                         const Fingerprint& call);

class ChannelSender {
 public:
  /// `receiver`: of the same channel, for sends to oneself.
  ChannelSender(ChannelCore& core, ChannelReceiver& receiver) : core_(core), receiver_(receiver) {}

  /// Writes a small message directly to the stream if the peer's link has nothing else to write.
  /// Nothing is queued, and nothing is allocated if the stream accepts all of it, the usual case. A
  /// message of a `SendBatch` goes into the link's buffer instead. Returns the number of bytes
  /// written, header included; 0: the message must be posted.
  std::size_t send_inline(int rank, std::uint64_t tag, ConstBytes data, const Fingerprint& call);
  /// The stream took the first bytes of this one inline; the rest is queued.
  void queue_rest(const TransferStateRef& send, std::size_t written);
  void post(const TransferStateRef& send);
  /// The shared transfer of all messages to that rank that the stream accepted inline.
  TransferRef sent_inline(int rank);

  Status on_credit(Link& link, const FrameHeader& header);
  /// Afterwards no byte is read from the send's buffer. The peer is notified if it must know.
  void release(TransferState& send);

 private:
  bool try_send(CreditState& credit, const TransferStateRef& send);
  void send_to_oneself(const TransferStateRef& send);
  void withdraw(TransferState& send);

  ChannelCore& core_;
  ChannelReceiver& receiver_;
};

}  // namespace muster::transport
