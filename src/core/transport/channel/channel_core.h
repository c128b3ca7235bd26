// SPDX-License-Identifier: BSD-3-Clause
/// The state shared by the sending and the receiving half of a channel. Private to `transport/`;
/// under the engine's lock.
///
/// Peers are job ranks here; only the `Channel` interface uses positions in the group.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/transport/channel/call_comparator.h"
#include "core/transport/channel/credit.h"
#include "core/transport/channel/message_matcher.h"
#include "core/transport/channel/messages.h"
#include "core/transport/link/links.h"

namespace muster::transport {

class ChannelCore {
 public:
  ChannelCore(EngineContext& engine_context, Links& engine_links, std::uint32_t channel)
      : engine(engine_context),
        links(engine_links),
        id(channel),
        calls(engine.options.rules, engine.rank()),
        matcher(engine.ranks) {}

  bool opened() const { return !members.empty(); }
  bool has_member(int rank) const { return positions.contains(rank); }
  int position_of(int rank) const;
  int size() const { return static_cast<int>(members.size()); }

  /// A transfer on this channel, not finished. `member` may be kAnyMember.
  TransferStateRef start(bool sends, int member, std::uint64_t tag, const Fingerprint& call);
  void finish(TransferState& transfer, Status status);
  /// Completes a receive whose message (of `header`) is in its buffer.
  void finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                      std::size_t bytes);
  /// Compares a call of `source` with ours. False if they disagree; the channel has then failed.
  bool check_call(int source, const Fingerprint& call);
  /// Checks what is known of the peer. If the transfer can never succeed, finishes it and returns
  /// true.
  bool is_hopeless(TransferState& transfer, int rank);
  /// Why nothing more comes from `rank` on this channel, or success.
  const Status& why_gone(int rank) const {
    const auto found = left.empty() ? left.end() : left.find(rank);
    return found == left.end() ? engine.ranks.gone(rank) : found->second;
  }

  EngineContext& engine;
  Links& links;
  const std::uint32_t id;
  /// Empty until the channel is opened; constant from then on, and read without the lock.
  std::vector<int> members;
  std::unordered_map<int, int> positions;
  Status failure;              ///< set once, before `Channel::failed_`
  std::map<int, Status> left;  ///< members that use this channel no more
  TransferList transfers;
  CallComparator calls;
  CreditTable credits;
  MessageMatcher matcher;
};

/// The receiving half of a channel.
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

// The sending half of a channel.

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
