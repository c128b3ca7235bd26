/// The receiving half of a channel. Private to `transport/`; under the engine's lock.
#pragma once

#include <memory>

#include "core/transport/channel/channel_core.h"

namespace muster::transport {

class ChannelReceiver {
 public:
  explicit ChannelReceiver(ChannelCore& core) : core_(core) {}

  void post(const TransferStateRef& receive);
  /// `Channel::try_receive`, of a message with this header.
  TryReceive try_receive(int rank, const FrameHeader& expected, MutableBytes data);
  /// A whole message has arrived, or a send to oneself, whose bytes stay in the sender's buffer
  /// until a receive takes them.
  void accept(std::unique_ptr<Envelope> envelope);
  /// Afterwards no byte is written to the receive's buffer or read from that of a send to oneself.
  void release(TransferState& transfer);

  // Input from links. A failure is the peer's fault.
  Result<Arrival> begin_eager(int source, const FrameHeader& header);
  void end_eager(int source, const FrameHeader& header, Arrival arrival);
  Status on_request(Link& link, const FrameHeader& header);
  void on_withdraw(Link& link, std::uint64_t message);

 private:
  void give(std::unique_ptr<Envelope> envelope, const TransferStateRef& receive);
  void accept_request(Link& link, const FrameHeader& header, const TransferStateRef& receive);
  Status fit(const TransferState& receive, int source, const FrameHeader& header,
             std::size_t bytes) const;
  Status check_member(int source) const;
  Status hold_credit(int source, std::size_t eager_bytes);
  void give_credit(int source, std::size_t eager_bytes);
  void give_credit(int source, CreditState& credit, std::size_t eager_bytes);

  ChannelCore& core_;
};

}  // namespace muster::transport
