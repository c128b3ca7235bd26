// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/channel_core.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace muster::transport {

int ChannelCore::position_of(int rank) const {
  const auto found = positions.find(rank);
  return found == positions.end() ? -1 : found->second;
}

TransferStateRef ChannelCore::start(bool sends, int member, std::uint64_t tag,
                                    const Fingerprint& call) {
  auto transfer = std::make_shared<TransferState>();
  transfer->sends = sends;
  transfer->channel = id;
  transfer->rank = member < 0 ? -1 : members[static_cast<std::size_t>(member)];
  transfer->set_peer(member);
  transfer->call = call;
  transfer->key = MatchKey{transfer->rank, call.sequence, tag};
  transfer->order = matcher.next_order();
  transfers.add(transfer);
  return transfer;
}

void ChannelCore::finish(TransferState& transfer, Status status) {
  if (transfer.stage == TransferState::Stage::finished) return;
  const TransferStateRef keep = transfers.remove(transfer);
  // Its owner may free the buffer and the transfer from here on.
  transfer.complete(std::move(status));
  engine.pass.completed = true;
}

void ChannelCore::finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                                 std::size_t bytes) {
  if (transfer.stage == TransferState::Stage::finished) return;
  transfer.set_message(position_of(source), bytes, header.call);
  finish(transfer, Status());
}

bool ChannelCore::check_call(int source, const Fingerprint& call) {
  const Status status = calls.check(source, call);
  if (!status) engine.failures->on_channel_failure(id, status);
  return status.ok();
}

bool ChannelCore::is_hopeless(TransferState& transfer, int rank) {
  if (engine.ranks.has_unneeded_deaths()) engine.failures->on_needed(rank);
  if (!failure.ok()) return true;  // the failed channel has finished the transfer
  const Status& gone = why_gone(rank);
  if (!gone.ok()) finish(transfer, gone);
  return !gone.ok();
}

void ChannelReceiver::post(const TransferStateRef& receive) {
  if (!core_.failure.ok()) return core_.finish(*receive, core_.failure);
  if (auto envelope = core_.matcher.take_for(*receive, core_.members))
    return give(std::move(envelope), receive);
  const int rank = receive->rank;
  if (rank >= 0 && rank != core_.engine.rank() && core_.is_hopeless(*receive, rank)) return;
  core_.matcher.post(*receive);
}

/// Does for a message of this header, if it is at the front of the ring, what `begin_eager` and
/// `end_eager` would do.
TryReceive ChannelReceiver::try_receive(int rank, const FrameHeader& expected, MutableBytes data) {
  PassState& pass = core_.engine.pass;
  Link* const link = core_.links.find(rank);
  if (pass.owes_pass() || link == nullptr || !core_.failure.ok() ||
      !core_.matcher.is_untouched(MatchKey{rank, 0, expected.tag}))
    return TryReceive::needs_transfer;
  CreditState& credit = core_.credits.with(rank);
  // A large message is preceded by a request. The ring is polled anyway: it is empty or holds the
  // request.
  if (!credit.allows(std::min(data.size(), kEagerBytes))) return TryReceive::needs_transfer;
  if (const TryReceive taken = link->try_receive(expected, data); taken != TryReceive::received)
    return taken;
  ++pass.taken_since;
  credit.hold(data.size());
  give_credit(rank, credit, data.size());
  return TryReceive::received;
}

void ChannelReceiver::accept(std::unique_ptr<Envelope> envelope) {
  if (TransferStateRef receive = core_.matcher.match(envelope->key)) {
    give(std::move(envelope), receive);
  } else {
    core_.matcher.keep(std::move(envelope));
  }
}

void ChannelReceiver::release(TransferState& transfer) {
  switch (transfer.stage) {
    case TransferState::Stage::posted: core_.matcher.withdraw(transfer); return;
    case TransferState::Stage::arriving:
      if (Link* link = core_.links.find(transfer.from)) link->abandon(transfer);
      return;
    case TransferState::Stage::local:
      core_.matcher.take_if([&](const Envelope& e) { return e.local.get() == &transfer; });
      return;
    default: return;
  }
}

/// Delivers an unmatched message to a receive.
void ChannelReceiver::give(std::unique_ptr<Envelope> envelope, const TransferStateRef& receive) {
  const int source = envelope->key.source;
  const FrameHeader& header = envelope->header;
  receive->stage = TransferState::Stage::arriving;
  receive->from = source;
  if (header.kind == FrameKind::request) {
    give_credit(source, 0);
    return accept_request(core_.links.to(source), header, receive);
  }
  const ConstBytes data =
      envelope->local ? envelope->local->out : ConstBytes(envelope->payload.get(), header.length);
  Status fits = fit(*receive, source, header, data.size());
  if (fits.ok() && !data.empty()) std::memmove(receive->in.data(), data.data(), data.size());
  if (envelope->local) {
    core_.finish(*envelope->local, Status());
  } else {
    give_credit(source, header.length);
  }
  if (!fits) return core_.finish(*receive, std::move(fits));
  core_.finish_receive(*receive, source, header, data.size());
}

/// A requested message has been matched with a receive.
void ChannelReceiver::accept_request(Link& link, const FrameHeader& header,
                                     const TransferStateRef& receive) {
  FrameHeader answer;
  answer.channel = core_.id;
  answer.message = header.message;
  if (Status fits = fit(*receive, link.peer(), header, header.amount); !fits) {
    answer.kind = FrameKind::refuse;
    core_.links.writer.push_control(link, answer);
    return core_.finish(*receive, std::move(fits));
  }
  link.messages.expect(header, receive);
  answer.kind = FrameKind::clear;
  core_.links.writer.push_control(link, answer);
}

/// Checks that a message fits a receive. If not, the error describes both.
Status ChannelReceiver::fit(const TransferState& receive, int source, const FrameHeader& header,
                            std::size_t bytes) const {
  const bool size_fits = receive.exact ? bytes == receive.in.size() : bytes <= receive.in.size();
  if (size_fits && header.call.dtype == receive.call.dtype) return {};
  const auto text = [this](const Fingerprint& call, std::size_t size) {
    return core_.calls.describe(call) + " of " + std::to_string(size) + " bytes";
  };
  const int me = core_.engine.rank();
  return Status(Code::mismatch,
                rank_text(source) + " sent " + text(header.call, bytes) + ", but " + rank_text(me) +
                    " receives " + text(receive.call, receive.in.size()) +
                    (receive.exact ? "" : " at most") + " (tag " + std::to_string(receive.key.tag) +
                    "): the message is dropped; both sides must give the same size and type",
                {source, me});
}

// ---- what links bring

Status ChannelReceiver::check_member(int source) const {
  if (!core_.opened() || core_.has_member(source)) return {};
  return Status(Code::internal,
                "a message on channel " + std::to_string(core_.id) + ", of which it is no member");
}

Result<Arrival> ChannelReceiver::begin_eager(int source, const FrameHeader& header) {
  Arrival arrival;
  if (!core_.failure.ok()) return arrival;
  if (Status status = check_member(source); !status) return status;
  if (Status status = hold_credit(source, header.length); !status) return status;
  if (!core_.check_call(source, header.call)) return arrival;
  const MatchKey key{source, header.call.sequence, header.tag};
  arrival.holds_credit = true;
  // Read directly into a matching receive, if there is one.
  arrival.receive = core_.matcher.match(key);
  if (arrival.receive) {
    if (Status misfit = fit(*arrival.receive, source, header, header.length); !misfit)
      core_.finish(*std::exchange(arrival.receive, nullptr), std::move(misfit));
    return arrival;
  }
  arrival.envelope = std::make_unique<Envelope>();
  arrival.envelope->key = key;
  arrival.envelope->header = header;
  if (header.length > 0)
    arrival.envelope->payload.reset(new std::byte[header.length]);  // at most kEagerBytes
  return arrival;
}

void ChannelReceiver::end_eager(int source, const FrameHeader& header, Arrival arrival) {
  if (!core_.failure.ok() || !arrival.holds_credit) return;
  // A receive may have been posted while the payload arrived.
  if (arrival.envelope) return accept(std::move(arrival.envelope));
  give_credit(source, header.length);
  if (arrival.receive) core_.finish_receive(*arrival.receive, source, header, header.length);
}

Status ChannelReceiver::on_request(Link& link, const FrameHeader& header) {
  if (!core_.failure.ok()) return {};
  const int source = link.peer();
  if (Status status = check_member(source); !status) return status;
  if (Status status = hold_credit(source, 0); !status) return status;
  if (!core_.check_call(source, header.call)) return {};
  const MatchKey key{source, header.call.sequence, header.tag};
  if (TransferStateRef receive = core_.matcher.match(key)) {
    give_credit(source, 0);
    accept_request(link, header, receive);
    return {};
  }
  auto envelope = std::make_unique<Envelope>();
  envelope->key = key;
  envelope->header = header;
  core_.matcher.keep(std::move(envelope));
  return {};
}

void ChannelReceiver::on_withdraw(Link& link, std::uint64_t message) {
  const auto withdrawn = core_.matcher.take_if([&](const Envelope& e) {
    return e.key.source == link.peer() && e.header.kind == FrameKind::request &&
           e.header.message == message;
  });
  if (withdrawn) give_credit(link.peer(), 0);
}

// ---- credit

Status ChannelReceiver::hold_credit(int source, std::size_t eager_bytes) {
  CreditState& credit = core_.credits.with(source);
  if (!credit.allows(eager_bytes))
    return Status(Code::internal, "more messages on channel " + std::to_string(core_.id) +
                                      " than its credit allows");
  credit.hold(eager_bytes);
  return {};
}

void ChannelReceiver::give_credit(int source, std::size_t eager_bytes) {
  if (core_.failure.ok()) give_credit(source, core_.credits.with(source), eager_bytes);
}

/// Accounts for one matched message of `source` with this many eager bytes.
void ChannelReceiver::give_credit(int source, CreditState& credit, std::size_t eager_bytes) {
  if (!credit.take(eager_bytes)) return;
  FrameHeader frame;
  frame.kind = FrameKind::credit;
  frame.channel = core_.id;
  frame.tag = credit.envelopes_due;
  frame.amount = credit.eager_due;
  credit.give_back();
  core_.links.writer.push_control(core_.links.to(source), frame);
}

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
