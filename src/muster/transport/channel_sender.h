/// The sending half of a channel. Private to `transport/`; under the engine's lock.
#pragma once

#include "muster/transport/channel_core.h"
#include "muster/transport/channel_receiver.h"

namespace muster::transport {

/// The header of a small message.
FrameHeader eager_header(std::uint32_t channel, std::uint64_t tag, std::size_t bytes,
                         const Fingerprint& call);

class ChannelSender {
 public:
  /// `receiver`: of the same channel, for sends to oneself.
  ChannelSender(ChannelCore& core, ChannelReceiver& receiver) : core_(core), receiver_(receiver) {}

  /// Hands a small message to a peer whose link has nothing else to write straight to the stream.
  /// Nothing is queued then, and nothing allocated if the stream takes all of it, as it mostly
  /// does. A message of a `SendBatch` goes into the link's buffer instead. Says how many bytes
  /// went, header included; 0: the message has to be posted.
  std::size_t send_inline(int rank, std::uint64_t tag, ConstBytes data, const Fingerprint& call);
  /// The stream took the first bytes of this one inline; the rest is queued.
  void queue_rest(const TransferStateRef& send, std::size_t written);
  void post(const TransferStateRef& send);
  /// Stands for every message to that rank that the stream took inline.
  TransferRef sent_inline(int rank);

  Status on_credit(Link& link, const FrameHeader& header);
  /// After this no byte is read from the buffer of the send. The peer is told if it must know.
  void release(TransferState& send);

 private:
  bool try_send(CreditState& credit, const TransferStateRef& send);
  void send_to_oneself(const TransferStateRef& send);
  void withdraw(TransferState& send);

  ChannelCore& core_;
  ChannelReceiver& receiver_;
};

}  // namespace muster::transport
