#include "muster/transport/link.h"

#include <algorithm>
#include <cstring>

#include "muster/base/words.h"
#include "muster/transport/engine.h"

namespace muster::transport {
namespace {

// A link's share of one pass.
constexpr std::size_t kReadShare = 1024 * 1024;
constexpr std::size_t kWriteShare = 1024 * 1024;

// From memory the header of a larger payload is read first, so that this is not copied twice.
constexpr std::size_t kWorthTwoReads = 4 * 1024;

Status wrong(const std::string& what) { return Status(Code::internal, what); }

template <class Bytes>
std::size_t total_of(std::span<const Bytes> pieces) {
  std::size_t total = 0;
  for (const Bytes& piece : pieces) total += piece.size();
  return total;
}

}  // namespace

/// Whether no more than the next frame's header is to be read: it announces much, or stands behind
/// a payload that is much.
bool Link::header_alone() const {
  const ConstBytes front = stream->look()[0];
  if (!protocol.between_frames() || front.size() < sizeof(FrameHeader)) return !front.empty();
  std::uint32_t length;
  std::memcpy(&length, front.data() + offsetof(FrameHeader, length), sizeof length);
  return length > kWorthTwoReads;
}

// Where a descriptor tells when there is more, a stream that gave or took less than it might is not
// asked again: that would be a system call for nothing.

bool Link::read_some() {
  const bool has_descriptor = up() && stream->descriptor() >= 0;
  std::size_t total = 0;
  while (up() && total < kReadShare) {
    std::array<MutableBytes, 2> pieces;
    const std::size_t count = protocol.input(pieces, header_alone());
    const std::size_t room = total_of(std::span<const MutableBytes>(pieces.data(), count));
    const Result<std::size_t> got = stream->read(std::span(pieces.data(), count));
    if (!got) {
      ended = got.status();
      return true;
    }
    if (*got == 0) break;
    total += *got;
    heard = engine_.pass_time();
    asked = TimePoint{};
    if (Status status = protocol.received(*got); !status) {
      ended = Status(Code::internal,
                     "rank " + std::to_string(peer_) + " has broken the message protocol on its " +
                         stream->kind() + " link: " + status.message(),
                     {peer_});
      return true;
    }
    if (*got < room && has_descriptor) break;
  }
  return total > 0;
}

std::size_t Link::write_at_once(const FrameHeader& header, ConstBytes payload) {
  if (!up() || in_service || protocol.has_output() || !write_failure.ok()) return 0;
  const std::array<ConstBytes, 2> pieces{std::as_bytes(std::span(&header, 1)), payload};
  const Result<std::size_t> took = stream->write(pieces);
  if (took && *took > 0) engine_.count_write();
  return took ? *took : 0;  // a failure is final: the ordinary way meets it again and deals with it
}

Taken Link::take_at_once(const FrameHeader& expected, MutableBytes data) {
  if (!up() || in_service || !protocol.between_frames()) return Taken::otherwise;
  const auto [front, rest] = stream->look();
  if (front.empty()) return Taken::not_yet;
  if (data.size() > kEagerBytes || front.size() + rest.size() < sizeof expected + data.size())
    return Taken::otherwise;
  FrameHeader around;
  const std::byte* header = front.data();
  if (front.size() < sizeof expected) {
    const auto from_front =
        std::copy(front.begin(), front.end(), reinterpret_cast<std::byte*>(&around));
    std::copy_n(rest.begin(), sizeof around - front.size(), from_front);
    header = reinterpret_cast<const std::byte*>(&around);
  }
  if (!equal_words<sizeof expected / 8>(header, &expected)) return Taken::otherwise;
  const ConstBytes behind = front.subspan(std::min(front.size(), sizeof expected));
  const std::size_t there = std::min(data.size(), behind.size());
  if (there > 0) std::memcpy(data.data(), behind.data(), there);
  const std::size_t skipped = sizeof expected - std::min(front.size(), sizeof expected);
  if (there < data.size())
    std::memcpy(data.data() + there, rest.data() + skipped, data.size() - there);
  stream->drop(sizeof expected + data.size());
  heard = last_message = engine_.time_of_news();
  asked = TimePoint{};
  return Taken::yes;
}

bool Link::write_some() {
  const bool has_descriptor = up() && stream->descriptor() >= 0;
  std::size_t total = 0;
  stuck = false;
  while (up() && total < kWriteShare && protocol.has_output()) {
    std::array<ConstBytes, LinkProtocol::kMaxPieces> pieces;
    const std::size_t count = protocol.output(pieces);
    const std::size_t offered = total_of(std::span<const ConstBytes>(pieces.data(), count));
    const Result<std::size_t> took = stream->write(std::span(pieces.data(), count));
    if (!took) {
      write_failure = took.status();
      break;
    }
    if (*took == 0) {
      stuck = true;
      break;
    }
    total += *took;
    engine_.count_write();
    protocol.sent(*took);
    if (*took < offered && has_descriptor) {
      stuck = protocol.has_output();
      break;
    }
  }
  return total > 0;
}

// ---- messages that ask first
// -----------------------------------------------------------------------------------------

std::uint64_t Link::add_request(const TransferStateRef& send) {
  const std::uint64_t id = next_message_++;
  requests.emplace(id, send);
  return id;
}

void Link::expect(std::uint64_t message, std::uint32_t channel, std::size_t bytes,
                  const FrameHeader& header, const TransferStateRef& receive) {
  incoming.emplace(message, Incoming{receive, header, bytes, 0});
  FrameHeader clear;
  clear.kind = FrameKind::clear;
  clear.channel = channel;
  clear.message = message;
  protocol.push_control(clear);
  engine_.mark_dirty(*this);
}

void Link::abandon(const TransferState& receive) {
  if (arrival_.receive.get() == &receive) {
    protocol.drain_payload();
    arrival_.receive = nullptr;
  }
  for (auto& [id, message] : incoming) {
    if (message.receive.get() == &receive) message.receive = nullptr;
  }
}

// ---- what comes
// ------------------------------------------------------------------------------------------------------

Result<MutableBytes> Link::on_payload(const FrameHeader& header) {
  if (header.kind == FrameKind::data) return on_data_payload(header);
  Result<ChannelState*> channel = engine_.channel_for(header.channel);
  if (!channel) return channel.status();
  arrival_ = {};
  if (*channel == nullptr) return MutableBytes();
  Result<Arrival> arrival = (*channel)->begin_eager(peer_, header);
  if (!arrival) return arrival.status();
  arrival_ = std::move(*arrival);
  if (arrival_.receive)
    return arrival_.receive->in.first(
        std::min<std::size_t>(arrival_.receive->in.size(), header.length));
  if (arrival_.envelope) return MutableBytes(arrival_.envelope->payload.get(), header.length);
  return MutableBytes();
}

Result<MutableBytes> Link::on_data_payload(const FrameHeader& header) {
  const auto found = incoming.find(header.message);
  if (found == incoming.end()) return wrong("a fragment of a message that nobody has asked for");
  Incoming& message = found->second;
  if (header.amount != message.got || header.length > message.bytes - message.got) {
    return wrong("a fragment at byte " + std::to_string(header.amount) + " where byte " +
                 std::to_string(message.got) + " of " + std::to_string(message.bytes) +
                 " was to come");
  }
  arrival_ = {};
  if (!message.receive) return MutableBytes();
  arrival_.receive = message.receive;
  return message.receive->in.subspan(message.got, header.length);
}

Status Link::on_frame(const FrameHeader& header, ConstBytes record) {
  if (header.kind <= FrameKind::data) last_message = heard;
  switch (header.kind) {
    case FrameKind::eager: {
      Result<ChannelState*> channel = engine_.channel_for(header.channel);
      if (!channel) return channel.status();
      if (header.length == 0) {
        arrival_ = {};
        if (*channel == nullptr) return {};
        Result<Arrival> arrival = (*channel)->begin_eager(peer_, header);
        if (!arrival) return arrival.status();
        arrival_ = std::move(*arrival);
      }
      Arrival arrival = std::exchange(arrival_, {});
      return *channel == nullptr ? Status()
                                 : (*channel)->end_eager(peer_, header, std::move(arrival));
    }
    case FrameKind::request: {
      Result<ChannelState*> channel = engine_.channel_for(header.channel);
      if (!channel) return channel.status();
      if (header.amount == 0) return wrong("a request to send nothing");
      if (*channel != nullptr) return (*channel)->on_request(*this, header);
      FrameHeader refuse;
      refuse.kind = FrameKind::refuse;
      refuse.channel = header.channel;
      refuse.message = header.message;
      protocol.push_control(refuse);
      engine_.mark_dirty(*this);
      return {};
    }
    case FrameKind::clear: return on_clear(header);
    case FrameKind::data: return on_data(header);
    case FrameKind::withdraw: return on_withdraw(header);
    case FrameKind::refuse: return on_refuse(header);
    case FrameKind::credit: {
      Result<ChannelState*> channel = engine_.channel_for(header.channel);
      if (!channel) return channel.status();
      return *channel == nullptr ? Status() : (*channel)->on_credit(*this, header);
    }
    case FrameKind::channel_failure: {
      const auto cause = decode_cause(as_text(record), engine_.world_size());
      if (!cause) return wrong("a cause of failure that cannot be read");
      Result<ChannelState*> channel = engine_.channel_for(header.channel);
      if (!channel) return channel.status();
      if (*channel != nullptr) engine_.fail_channel(**channel, *cause, peer_);
      return {};
    }
    case FrameKind::rank_failure: {
      const auto cause = decode_cause(as_text(record), engine_.world_size());
      if (!cause || header.message >= static_cast<std::uint64_t>(engine_.world_size())) {
        return wrong("the news of a failed rank that cannot be read");
      }
      engine_.on_rank_failure(peer_, static_cast<int>(header.message), *cause, header.amount != 0);
      return {};
    }
    case FrameKind::ping: {
      if (protocol.queued(FrameKind::pong)) return {};
      FrameHeader pong;
      pong.kind = FrameKind::pong;
      protocol.push_control(pong);
      engine_.mark_dirty(*this);
      return {};
    }
    case FrameKind::pong: return {};
    case FrameKind::goodbye: engine_.on_goodbye(*this, header.amount != 0); return {};
    case FrameKind::farewell:
      farewell = true;
      engine_.note_completion();
      return {};
  }
  return wrong("a frame of an unknown kind");
}

Status Link::on_data(const FrameHeader& header) {
  const auto found = incoming.find(header.message);
  if (found == incoming.end()) return wrong("a fragment of a message that nobody has asked for");
  arrival_ = {};
  Incoming& message = found->second;
  message.got += header.length;
  if (message.got < message.bytes) return {};
  const Incoming whole = std::move(message);
  incoming.erase(found);
  if (!whole.receive) return {};
  if (const Result<ChannelState*> channel = engine_.channel_for(whole.header.channel);
      channel && *channel != nullptr) {
    (*channel)->finish_receive(*whole.receive, peer_, whole.header, whole.bytes);
  }
  return {};
}

Status Link::on_clear(const FrameHeader& header) {
  if (header.message >= next_message_) return wrong("it wants a message that was never announced");
  const auto found = requests.find(header.message);
  if (found == requests.end()) return {};  // taken back meanwhile
  const TransferStateRef& send = found->second;
  if (send->stage != TransferState::Stage::requested) return wrong("it wants a message twice");
  send->stage = TransferState::Stage::streaming;
  FrameHeader data;
  data.kind = FrameKind::data;
  data.channel = send->channel;
  data.message = header.message;
  protocol.push_stream(data, send->out, send);
  engine_.mark_dirty(*this);
  return {};
}

Status Link::on_withdraw(const FrameHeader& header) {
  const auto found = incoming.find(header.message);
  if (found == incoming.end()) {
    if (const Result<ChannelState*> channel = engine_.channel_for(header.channel);
        channel && *channel != nullptr)
      (*channel)->on_withdraw(*this, header.message);
    return {};
  }
  const TransferStateRef receive = found->second.receive;
  const std::uint32_t id = found->second.header.channel;
  incoming.erase(found);
  if (!receive) return {};
  const Result<ChannelState*> channel = engine_.channel_for(id);
  if (channel && *channel != nullptr) {
    (*channel)->finish(*receive, Status(Code::aborted,
                                        "rank " + std::to_string(peer_) +
                                            " took back the message that this receive was taking",
                                        {peer_}));
  }
  return {};
}

Status Link::on_refuse(const FrameHeader& header) {
  if (header.message >= next_message_)
    return wrong("it refuses a message that was never announced");
  const auto found = requests.find(header.message);
  if (found == requests.end()) return {};
  const TransferStateRef send = found->second;
  if (send->stage != TransferState::Stage::requested)
    return wrong("it refuses a message that it has asked for");
  requests.erase(found);
  // Like an eager message that did not fit its receive: it has arrived, what became of it is the
  // receiver's affair.
  if (const Result<ChannelState*> channel = engine_.channel_for(send->channel);
      channel && *channel != nullptr)
    (*channel)->finish(*send, Status());
  return {};
}

void Link::on_sent(const std::shared_ptr<void>& owner) {
  auto& send = *static_cast<TransferState*>(owner.get());
  if (send.stage == TransferState::Stage::streaming) requests.erase(send.message);
  const Result<ChannelState*> channel = engine_.channel_for(send.channel);
  if (channel && *channel != nullptr) (*channel)->finish(send, Status());
}

}  // namespace muster::transport
