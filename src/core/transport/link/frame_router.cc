// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/link/frame_router.h"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::transport {
namespace {

Status wrong(const std::string& what) { return Status(Code::internal, what); }

}  // namespace

Result<MutableBytes> FrameRouter::on_payload(const FrameHeader& header) {
  if (header.kind == FrameKind::data) return on_data_payload(header);
  Result<ChannelState*> channel = channels_.for_frame(header.channel);
  if (!channel) return channel.status();
  Arrival& arrival = link_.messages.arrival = {};
  if (*channel == nullptr) return MutableBytes();
  Result<Arrival> begun = (*channel)->receiver().begin_eager(link_.peer(), header);
  if (!begun) return begun.status();
  arrival = std::move(*begun);
  if (arrival.receive)
    return arrival.receive->in.first(
        std::min<std::size_t>(arrival.receive->in.size(), header.length));
  if (arrival.envelope) return MutableBytes(arrival.envelope->payload.get(), header.length);
  return MutableBytes();
}

Result<MutableBytes> FrameRouter::on_data_payload(const FrameHeader& header) {
  LinkMessages::Incoming* const message = link_.messages.incoming(header.message);
  if (message == nullptr) return wrong("a fragment of a message that nobody has asked for");
  if (header.amount != message->got || header.length > message->bytes - message->got) {
    return wrong("a fragment at byte " + std::to_string(header.amount) + " where byte " +
                 std::to_string(message->got) + " of " + std::to_string(message->bytes) +
                 " was to come");
  }
  link_.messages.arrival = {};
  if (!message->receive) return MutableBytes();
  link_.messages.arrival.receive = message->receive;
  return message->receive->in.subspan(message->got, header.length);
}

Status FrameRouter::on_frame(const FrameHeader& header, ConstBytes record) {
  if (header.kind <= FrameKind::data) link_.times.last_message = link_.times.heard;
  switch (header.kind) {
    case FrameKind::eager:
    case FrameKind::request:
    case FrameKind::credit: return on_message(header);
    case FrameKind::clear: return on_clear(header);
    case FrameKind::data: return on_data(header);
    case FrameKind::withdraw: return on_withdraw(header);
    case FrameKind::refuse: return on_refuse(header);
    case FrameKind::channel_failure: return on_channel_failure(header, record);
    case FrameKind::rank_failure: return on_rank_failure(header, record);
    case FrameKind::ping: on_ping(); return {};
    case FrameKind::pong: return {};
    case FrameKind::close: detector_.on_close(link_, header.amount != 0); return {};
    case FrameKind::close_ack:
      link_.close.acknowledged = true;
      engine_.pass.completed = true;
      return {};
  }
  return wrong("a frame of an unknown kind");
}

/// A frame that may name a channel which is not open yet.
Status FrameRouter::on_message(const FrameHeader& header) {
  Result<ChannelState*> channel = channels_.for_frame(header.channel);
  if (!channel) return channel.status();
  switch (header.kind) {
    case FrameKind::eager: return on_eager(header, *channel);
    case FrameKind::request: return on_request(header, *channel);
    default: return *channel == nullptr ? Status() : (*channel)->sender().on_credit(link_, header);
  }
}

Status FrameRouter::on_eager(const FrameHeader& header, ChannelState* channel) {
  if (header.length == 0) {  // `on_payload` was not called for it
    link_.messages.arrival = {};
    if (channel == nullptr) return {};
    Result<Arrival> begun = channel->receiver().begin_eager(link_.peer(), header);
    if (!begun) return begun.status();
    link_.messages.arrival = std::move(*begun);
  }
  Arrival arrival = std::exchange(link_.messages.arrival, {});
  if (channel != nullptr) channel->receiver().end_eager(link_.peer(), header, std::move(arrival));
  return {};
}

Status FrameRouter::on_request(const FrameHeader& header, ChannelState* channel) {
  if (header.amount == 0) return wrong("a request to send nothing");
  if (channel != nullptr) return channel->receiver().on_request(link_, header);
  FrameHeader refuse;
  refuse.kind = FrameKind::refuse;
  refuse.channel = header.channel;
  refuse.message = header.message;
  writer_.push_control(link_, refuse);
  return {};
}

Status FrameRouter::on_data(const FrameHeader& header) {
  LinkMessages::Incoming* const message = link_.messages.incoming(header.message);
  if (message == nullptr) return wrong("a fragment of a message that nobody has asked for");
  link_.messages.arrival = {};
  message->got += header.length;
  if (message->got < message->bytes) return {};
  const LinkMessages::Incoming whole = link_.messages.take_incoming(header.message);
  if (!whole.receive) return {};
  if (ChannelState* const channel = channels_.find(whole.header.channel))
    channel->core().finish_receive(*whole.receive, link_.peer(), whole.header, whole.bytes);
  return {};
}

Status FrameRouter::on_clear(const FrameHeader& header) {
  if (!link_.messages.was_announced(header.message))
    return wrong("it wants a message that was never announced");
  const TransferStateRef send = link_.messages.request(header.message);
  if (!send) return {};  // cancelled in the meantime
  if (send->stage != TransferState::Stage::requested) return wrong("it wants a message twice");
  send->stage = TransferState::Stage::streaming;
  FrameHeader data;
  data.kind = FrameKind::data;
  data.channel = send->channel;
  data.message = header.message;
  link_.protocol.out.push_stream(data, send->out, send);
  writer_.mark_dirty(link_);
  return {};
}

Status FrameRouter::on_withdraw(const FrameHeader& header) {
  if (link_.messages.incoming(header.message) == nullptr) {
    const Result<ChannelState*> channel = channels_.for_frame(header.channel);
    if (channel && *channel != nullptr) (*channel)->receiver().on_withdraw(link_, header.message);
    return {};
  }
  const LinkMessages::Incoming taken = link_.messages.take_incoming(header.message);
  ChannelState* const channel = channels_.find(taken.header.channel);
  if (!taken.receive || channel == nullptr) return {};
  channel->core().finish(
      *taken.receive,
      Status(Code::aborted,
             rank_text(link_.peer()) + " took back the message that this receive was taking",
             {link_.peer()}));
  return {};
}

Status FrameRouter::on_refuse(const FrameHeader& header) {
  if (!link_.messages.was_announced(header.message))
    return wrong("it refuses a message that was never announced");
  const TransferStateRef send = link_.messages.request(header.message);
  if (!send) return {};
  if (send->stage != TransferState::Stage::requested)
    return wrong("it refuses a message that it has asked for");
  link_.messages.forget_request(header.message);
  // As for an eager message that did not fit its receive: for the sender it has arrived, and the
  // error is the receiver's.
  if (ChannelState* const channel = channels_.find(send->channel))
    channel->core().finish(*send, Status());
  return {};
}

Status FrameRouter::on_channel_failure(const FrameHeader& header, ConstBytes record) {
  const auto cause = decode_cause(as_text(record), engine_.world_size());
  if (!cause) return wrong("a cause of failure that cannot be read");
  Result<ChannelState*> channel = channels_.for_frame(header.channel);
  if (!channel) return channel.status();
  if (*channel != nullptr) detector_.fail_channel(**channel, *cause, link_.peer());
  return {};
}

Status FrameRouter::on_rank_failure(const FrameHeader& header, ConstBytes record) {
  const auto cause = decode_cause(as_text(record), engine_.world_size());
  if (!cause || header.message >= static_cast<std::uint64_t>(engine_.world_size()))
    return wrong("the news of a failed rank that cannot be read");
  if (header.amount > static_cast<std::uint64_t>(RankNews::trouble))
    return wrong("news of a rank of an unknown kind");
  detector_.on_told_rank_failure(link_.peer(), static_cast<int>(header.message), *cause,
                                 static_cast<RankNews>(header.amount));
  return {};
}

void FrameRouter::on_ping() {
  if (link_.protocol.out.queued(FrameKind::pong)) return;
  FrameHeader pong;
  pong.kind = FrameKind::pong;
  writer_.push_control(link_, pong);
}

void FrameRouter::on_sent(const std::shared_ptr<void>& owner) {
  auto& send = *static_cast<TransferState*>(owner.get());
  if (send.stage == TransferState::Stage::streaming) link_.messages.forget_request(send.message);
  if (ChannelState* const channel = channels_.find(send.channel))
    channel->core().finish(send, Status());
}

}  // namespace muster::transport
