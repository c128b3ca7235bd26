#include "core/transport/channel/channel_sender.h"

#include <memory>
#include <utility>

namespace muster::transport {

FrameHeader eager_header(std::uint32_t channel, std::uint64_t tag, std::size_t bytes,
                         const Fingerprint& call) {
  FrameHeader header;
  header.length = static_cast<std::uint32_t>(bytes);
  header.kind = FrameKind::eager;
  header.channel = channel;
  header.tag = tag;
  copy_words(header.call, call);
  return header;
}

std::size_t ChannelSender::send_inline(int rank, std::uint64_t tag, ConstBytes data,
                                       const Fingerprint& call) {
  Link* const link = core_.links.find(rank);
  EngineContext& engine = core_.engine;
  if (link == nullptr || rank == engine.rank()) return 0;
  if (engine.ranks.has_unneeded_deaths()) engine.failures->on_needed(rank);
  if (!core_.failure.ok() || !core_.why_gone(rank).ok()) return 0;
  CreditState& credit = core_.credits.with(rank);
  if (!credit.blocked.empty() || credit.envelopes_left == 0 || data.size() > credit.eager_left)
    return 0;
  const FrameHeader header = eager_header(core_.id, tag, data.size(), call);
  std::size_t took = core_.links.writer.batch(*link, header, data);
  if (took == 0) {
    took = link->write_inline(header, data);
    if (link->has_output()) core_.links.writer.mark_dirty(*link);
  }
  if (took == 0) return 0;
  ++engine.pass.traffic.messages;
  credit.spend(data.size());
  return took;
}

void ChannelSender::queue_rest(const TransferStateRef& send, std::size_t written) {
  send->stage = TransferState::Stage::queued;
  Link& link = core_.links.to(send->rank);
  link.protocol.out.push_begun(eager_header(core_.id, send->key.tag, send->out.size(), send->call),
                               send->out, send, written);
  core_.links.writer.mark_dirty(link);
}

TransferRef ChannelSender::sent_inline(int rank) {
  TransferStateRef& sent = core_.credits.with(rank).sent;
  if (!sent) {
    sent = std::make_shared<TransferState>();
    sent->sends = true;
    sent->set_peer(core_.position_of(rank));
    sent->complete(Status());
  }
  return sent;
}

void ChannelSender::post(const TransferStateRef& send) {
  if (!core_.failure.ok()) return core_.finish(*send, core_.failure);
  const int rank = send->rank;
  if (rank == core_.engine.rank()) return send_to_oneself(send);
  if (core_.is_hopeless(*send, rank)) return;
  CreditState& credit = core_.credits.with(rank);
  if (!credit.blocked.empty() || !try_send(credit, send)) {
    send->stage = TransferState::Stage::blocked;
    credit.blocked.push_back(send);
  }
}

/// Queues the message, or its request, on the link; false without credit.
bool ChannelSender::try_send(CreditState& credit, const TransferStateRef& send) {
  if (credit.envelopes_left == 0) return false;
  ++core_.engine.pass.traffic.messages;
  Link& link = core_.links.to(send->rank);
  FrameHeader header;
  header.channel = core_.id;
  header.tag = send->key.tag;
  header.call = send->call;
  const std::size_t bytes = send->out.size();
  if (bytes <= kEagerBytes && bytes <= credit.eager_left) {
    credit.spend(bytes);
    header.kind = FrameKind::eager;
    send->stage = TransferState::Stage::queued;
    link.protocol.out.push_message(header, send->out, send);
  } else {
    credit.spend(0);
    header.kind = FrameKind::request;
    header.amount = bytes;
    header.message = send->message = link.messages.add_request(send);
    send->stage = TransferState::Stage::requested;
    link.protocol.out.push_message(header);
  }
  core_.links.writer.mark_dirty(link);
  return true;
}

void ChannelSender::send_to_oneself(const TransferStateRef& send) {
  send->stage = TransferState::Stage::local;
  auto envelope = std::make_unique<Envelope>();
  envelope->key = send->key;
  envelope->header.channel = core_.id;
  envelope->header.tag = send->key.tag;
  envelope->header.call = send->call;
  envelope->header.amount = send->out.size();
  envelope->local = send;
  if (core_.check_call(core_.engine.rank(), send->call)) receiver_.accept(std::move(envelope));
}

Status ChannelSender::on_credit(Link& link, const FrameHeader& header) {
  if (!core_.failure.ok()) return {};
  CreditState& credit = core_.credits.with(link.peer());
  if (!credit.refill(header.tag, header.amount)) {
    return Status(Code::internal,
                  "more credit on channel " + std::to_string(core_.id) + " than was ever taken");
  }
  while (!credit.blocked.empty() && try_send(credit, credit.blocked.front()))
    credit.blocked.pop_front();
  return {};
}

void ChannelSender::release(TransferState& send) {
  using Stage = TransferState::Stage;
  switch (send.stage) {
    case Stage::blocked:
      std::erase_if(core_.credits.with(send.rank).blocked,
                    [&](const TransferStateRef& each) { return each.get() == &send; });
      return;
    case Stage::queued:
    case Stage::requested:
    case Stage::streaming: return withdraw(send);
    default: return;
  }
}

/// Cancels a message on its link.
void ChannelSender::withdraw(TransferState& send) {
  using Stage = TransferState::Stage;
  Link& link = *core_.links.find(send.rank);
  const FrameWriter::Detached detached = link.protocol.out.detach(&send);
  if (detached.message_dropped) core_.credits.with(send.rank).unspend(send.out.size());
  if (send.stage == Stage::queued) return;
  link.messages.forget_request(send.message);
  if (send.stage == Stage::streaming && !detached.stream_cut) return;
  FrameHeader withdraw;
  withdraw.kind = FrameKind::withdraw;
  withdraw.channel = core_.id;
  withdraw.message = send.message;
  link.protocol.out.push_message(withdraw);
  core_.links.writer.mark_dirty(link);
}

}  // namespace muster::transport
