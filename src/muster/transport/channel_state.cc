#include "muster/transport/channel_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "muster/transport/engine.h"

namespace muster::transport {
namespace {

// Credit goes back when a quarter of it is due: a sender that is out of credit then always gets
// some, because what it lacks is either untaken here or due.
constexpr std::size_t kEagerDue = kEagerCredit / 4;
constexpr std::uint32_t kEnvelopesDue = kEnvelopeCredit / 4;

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

ChannelState::~ChannelState() { drop_unexpected(); }

Fabric& ChannelState::fabric() { return engine_.fabric(); }

int ChannelState::position_of(int rank) const {
  const auto found = positions_.find(rank);
  return found == positions_.end() ? -1 : found->second;
}

// ---- posting
// ---------------------------------------------------------------------------------------------------------

TransferStateRef ChannelState::start(bool sends, int member, std::uint64_t tag,
                                     const Fingerprint& call) {
  auto transfer = std::make_shared<TransferState>();
  transfer->sends = sends;
  transfer->channel = id_;
  transfer->rank = member < 0 ? -1 : members_[static_cast<std::size_t>(member)];
  transfer->set_peer(member);
  transfer->call = call;
  transfer->key = MatchKey{transfer->rank, call.sequence, tag};
  transfer->order = next_order_++;
  transfer->self = transfer;
  transfer->after = first_;
  if (first_ != nullptr) first_->before = transfer.get();
  first_ = transfer.get();
  return transfer;
}

/// A child has the parent's channels, but not its lock, its watcher or its peers.
TransferRef ChannelState::refused_in_child(bool sends) {
  auto transfer = std::make_shared<TransferState>();
  transfer->sends = sends;
  transfer->complete(Status(Code::aborted,
                            "a forked child cannot use its parent's process group; make one of its "
                            "own, or start the program anew"));
  return transfer;
}

TransferRef ChannelState::send(int member, std::uint64_t tag, ConstBytes data,
                               const Fingerprint& call) {
  return send(member, tag, data, call, true);
}

TransferRef ChannelState::send_off(int member, std::uint64_t tag, ConstBytes data,
                                   const Fingerprint& call) {
  return send(member, tag, data, call, false);
}

/// `stand_in`: also of what has gone there is to be a transfer.
TransferRef ChannelState::send(int member, std::uint64_t tag, ConstBytes data,
                               const Fingerprint& call, bool stand_in) {
  if (engine_.forked()) return refused_in_child(true);
  Engine::Entry entry(engine_);
  const bool valid = member >= 0 && member < size();
  const std::size_t took =
      valid && data.size() <= kEagerBytes ? send_at_once(member, tag, data, call) : 0;
  if (took == sizeof(FrameHeader) + data.size()) return stand_in ? sent(member) : nullptr;
  TransferStateRef transfer = start(true, valid ? member : kAnyMember, tag, call);
  transfer->out = data;
  if (took > 0) {
    transfer->stage = TransferState::Stage::queued;
    Link& link = engine_.link_to(transfer->rank);
    link.protocol.push_begun(eager_header(tag, data.size(), call), data, transfer, took);
    engine_.mark_dirty(link);
  } else if (!valid) {
    finish(*transfer,
           Status(Code::invalid_argument, "a message was sent to member " + std::to_string(member) +
                                              " of a group of " + std::to_string(size())));
  } else {
    post_send(transfer);
  }
  return transfer;
}

/// Stands for every message to that member that the stream took at once.
TransferRef ChannelState::sent(int member) {
  TransferStateRef& sent = flow_with(members_[static_cast<std::size_t>(member)]).sent;
  if (!sent) {
    sent = std::make_shared<TransferState>();
    sent->sends = true;
    sent->set_peer(member);
    sent->complete(Status());
  }
  return sent;
}

TransferRef ChannelState::receive(int member, std::uint64_t tag, MutableBytes data,
                                  const Fingerprint& call, bool exact) {
  if (engine_.forked()) return refused_in_child(false);
  Engine::Entry entry(engine_);
  const bool valid =
      (member >= 0 && member < size()) || (member == kAnyMember && call.sequence == 0);
  TransferStateRef transfer = start(false, valid ? member : kAnyMember, tag, call);
  transfer->in = data;
  transfer->exact = exact;
  if (!valid) {
    finish(*transfer, Status(Code::invalid_argument,
                             "a message was awaited from member " + std::to_string(member) +
                                 " of a group of " + std::to_string(size())));
  } else {
    post_receive(transfer);
  }
  return transfer;
}

/// What `begin_eager` and `end_eager` would do with such a message.
Taken ChannelState::receive_at_once(int member, std::uint64_t tag, MutableBytes data,
                                    const Fingerprint& call) {
  if (call.sequence != 0 || member < 0 || member >= size() || engine_.forked())
    return Taken::otherwise;
  Engine::Entry entry(engine_);
  const int rank = members_[static_cast<std::size_t>(member)];
  Link* const link = engine_.find_link(rank);
  const MatchKey key{rank, 0, tag};
  if (engine_.owes_a_pass() || link == nullptr || !failure_.ok() ||
      unexpected_.find(key) != nullptr)
    return Taken::otherwise;
  if (posted_.find(key) != nullptr || posted_any_.find(MatchKey{-1, 0, tag}) != nullptr)
    return Taken::otherwise;  // they come first
  const FrameHeader header = eager_header(tag, data.size(), call);
  Flow& flow = flow_with(rank);
  // (A large message asks first. What stands there is looked at all the same: nothing, or its
  // question.)
  if (!within_credit(flow, std::min(data.size(), kEagerBytes))) return Taken::otherwise;
  if (const Taken taken = link->take_at_once(header, data); taken != Taken::yes) return taken;
  engine_.taken_without_a_pass();
  hold_credit(flow, data.size());
  give_credit(rank, flow, data.size());
  return Taken::yes;
}

void ChannelState::post_send(const TransferStateRef& transfer) {
  if (!failure_.ok()) return finish(*transfer, failure_);
  const int rank = transfer->rank;
  if (rank == engine_.rank()) return send_local(transfer);
  engine_.now_needed(rank);
  if (!failure_.ok()) return;  // now_needed has finished it
  if (const Status& gone = engine_.gone(rank); !gone.ok()) return finish(*transfer, gone);
  Flow& flow = flow_with(rank);
  if (!flow.blocked.empty() || !try_send(flow, transfer)) {
    transfer->stage = TransferState::Stage::blocked;
    flow.blocked.push_back(transfer);
  }
}

/// A small message to a peer whose link has nothing else to write goes into the stream from where
/// it lies: nothing is queued, and where the stream takes all of it, as it mostly does, nothing is
/// made for it. One that travels together with others goes into the link's buffer instead. How many
/// bytes went, its header included; 0: it has to go the ordinary way.
std::size_t ChannelState::send_at_once(int member, std::uint64_t tag, ConstBytes data,
                                       const Fingerprint& call) {
  const int rank = members_[static_cast<std::size_t>(member)];
  Link* const link = engine_.find_link(rank);
  if (link == nullptr || rank == engine_.rank()) return 0;
  engine_.now_needed(rank);
  if (!failure_.ok() || !engine_.gone(rank).ok()) return 0;
  Flow& flow = flow_with(rank);
  if (!flow.blocked.empty() || flow.envelopes_left == 0 || data.size() > flow.eager_left) return 0;
  const FrameHeader header = eager_header(tag, data.size(), call);
  std::size_t took = engine_.gather(*link, header, data);
  if (took == 0) took = link->write_at_once(header, data);
  if (took == 0) return 0;
  engine_.count_message();
  --flow.envelopes_left;
  flow.eager_left -= data.size();
  return took;
}

FrameHeader ChannelState::eager_header(std::uint64_t tag, std::size_t bytes,
                                       const Fingerprint& call) const {
  FrameHeader header;
  header.length = static_cast<std::uint32_t>(bytes);
  header.kind = FrameKind::eager;
  header.channel = id_;
  header.tag = tag;
  copy_words(header.call, call);
  return header;
}

/// Hands the message, or the question for it, to the link; false without credit.
bool ChannelState::try_send(Flow& flow, const TransferStateRef& transfer) {
  if (flow.envelopes_left == 0) return false;
  engine_.count_message();
  --flow.envelopes_left;
  Link& link = engine_.link_to(transfer->rank);
  FrameHeader header;
  header.channel = id_;
  header.tag = transfer->key.tag;
  header.call = transfer->call;
  if (const std::size_t bytes = transfer->out.size();
      bytes <= kEagerBytes && bytes <= flow.eager_left) {
    flow.eager_left -= bytes;
    header.kind = FrameKind::eager;
    transfer->stage = TransferState::Stage::queued;
    link.protocol.push_message(header, transfer->out, transfer);
  } else {
    header.kind = FrameKind::request;
    header.amount = bytes;
    header.message = transfer->message = link.add_request(transfer);
    transfer->stage = TransferState::Stage::requested;
    link.protocol.push_message(header);
  }
  engine_.mark_dirty(link);
  return true;
}

/// To oneself: straight into the receive that waits, else it waits itself, its bytes where they
/// are.
void ChannelState::send_local(const TransferStateRef& transfer) {
  FrameHeader header;
  header.channel = id_;
  header.tag = transfer->key.tag;
  header.call = transfer->call;
  header.amount = transfer->out.size();
  transfer->stage = TransferState::Stage::local;
  auto envelope = std::make_unique<Envelope>();
  envelope->key = transfer->key;
  envelope->header = header;
  envelope->local = transfer;
  if (!check_call(engine_.rank(), transfer->call)) return;
  if (TransferStateRef receive = match(envelope->key)) {
    take(envelope.release(), receive);
  } else {
    keep(std::move(envelope));
  }
}

void ChannelState::post_receive(const TransferStateRef& transfer) {
  if (!failure_.ok()) return finish(*transfer, failure_);
  if (Envelope* envelope = find_unexpected(*transfer)) {
    unexpected_.remove(envelope);
    return take(envelope, transfer);
  }
  const int rank = transfer->rank;
  if (rank >= 0 && rank != engine_.rank()) {
    engine_.now_needed(rank);
    if (!failure_.ok()) return;
    if (const Status& gone = engine_.gone(rank); !gone.ok()) return finish(*transfer, gone);
  }
  transfer->stage = TransferState::Stage::posted;
  if (rank < 0) {
    posted_any_.add(transfer.get());
  } else {
    posted_.add(transfer.get());
    engine_.posted_from(rank, 1);
  }
}

// ---- matching
// --------------------------------------------------------------------------------------------------------

/// The receive posted first among those that this message fits; it is not posted any more.
TransferStateRef ChannelState::match(const MatchKey& key) {
  TransferState* found = posted_.find(key);
  if (key.sequence == 0) {
    TransferState* any = posted_any_.find(MatchKey{-1, 0, key.tag});
    if (any != nullptr && (found == nullptr || any->order < found->order)) found = any;
  }
  if (found == nullptr) return nullptr;
  if (found->rank < 0) {
    posted_any_.remove(found);
  } else {
    posted_.remove(found);
    engine_.posted_from(found->rank, -1);
  }
  found->stage = TransferState::Stage::arriving;
  found->from = key.source;
  return found->shared_from_this();
}

/// The message that came first among those that this receive fits.
Envelope* ChannelState::find_unexpected(const TransferState& receive) const {
  if (receive.rank >= 0) return unexpected_.find(receive.key);
  if (unexpected_.empty()) return nullptr;
  Envelope* first = nullptr;
  for (const int member : members_) {
    Envelope* found = unexpected_.find(MatchKey{member, 0, receive.key.tag});
    if (found != nullptr && (first == nullptr || found->arrival < first->arrival)) first = found;
  }
  return first;
}

void ChannelState::keep(std::unique_ptr<Envelope> envelope) {
  envelope->arrival = next_order_++;
  unexpected_.add(envelope.release());
}

void ChannelState::drop_unexpected() {
  while (Envelope* envelope = unexpected_.find_if([](const Envelope&) { return true; })) {
    unexpected_.remove(envelope);
    delete envelope;
  }
}

/// Gives a message that waited to a receive. Owns the envelope.
void ChannelState::take(Envelope* raw, const TransferStateRef& receive) {
  const std::unique_ptr<Envelope> envelope(raw);
  const int source = envelope->key.source;
  receive->stage = TransferState::Stage::arriving;
  receive->from = source;
  if (envelope->header.kind == FrameKind::request) {
    give_credit(source, 0);
    return accept_request(engine_.link_to(source), envelope->header, receive);
  }
  const ConstBytes data = envelope->local
                              ? envelope->local->out
                              : ConstBytes(envelope->payload.get(), envelope->header.length);
  Status fits = fit(*receive, source, envelope->header, data.size());
  if (fits.ok() && !data.empty()) std::memmove(receive->in.data(), data.data(), data.size());
  if (envelope->local) {
    finish(*envelope->local, Status());
  } else {
    give_credit(source, envelope->header.length);
  }
  if (!fits) return finish(*receive, std::move(fits));
  finish_receive(*receive, source, envelope->header, data.size());
}

/// A message that asks first has found its receive.
void ChannelState::accept_request(Link& link, const FrameHeader& header,
                                  const TransferStateRef& receive) {
  if (Status fits = fit(*receive, link.peer(), header, header.amount); !fits) {
    FrameHeader refuse;
    refuse.kind = FrameKind::refuse;
    refuse.channel = id_;
    refuse.message = header.message;
    link.protocol.push_control(refuse);
    engine_.mark_dirty(link);
    return finish(*receive, std::move(fits));
  }
  link.expect(header.message, id_, static_cast<std::size_t>(header.amount), header, receive);
}

/// Whether a message may go into a receive; if not, both in one sentence.
Status ChannelState::fit(const TransferState& receive, int source, const FrameHeader& header,
                         std::size_t bytes) const {
  const bool size_fits = receive.exact ? bytes == receive.in.size() : bytes <= receive.in.size();
  if (size_fits && header.call.dtype == receive.call.dtype) return {};
  const auto text = [this](const Fingerprint& call, std::size_t size) {
    return describe(call) + " of " + std::to_string(size) + " bytes";
  };
  return Status(Code::mismatch,
                rank_text(source) + " sent " + text(header.call, bytes) + ", but " +
                    rank_text(engine_.rank()) + " receives " +
                    text(receive.call, receive.in.size()) + (receive.exact ? "" : " at most") +
                    " (tag " + std::to_string(receive.key.tag) +
                    "): the message is dropped; both sides must give the same size and type",
                {source, engine_.rank()});
}

// ---- what links bring
// ------------------------------------------------------------------------------------------------

Result<Arrival> ChannelState::begin_eager(int source, const FrameHeader& header) {
  Arrival arrival;
  if (!failure_.ok()) return arrival;
  if (opened() && !has_member(source))
    return Status(Code::internal,
                  "a message on channel " + std::to_string(id_) + ", of which it is no member");
  if (Status status = hold_credit(source, header.length); !status) return status;
  if (!check_call(source, header.call)) return arrival;
  const MatchKey key{source, header.call.sequence, header.tag};
  // Straight into the receive where there is one that it fits.
  arrival.holds_credit = true;
  arrival.receive = match(key);
  if (arrival.receive) {
    if (Status misfit = fit(*arrival.receive, source, header, header.length); !misfit)
      finish(*std::exchange(arrival.receive, nullptr), std::move(misfit));
    return arrival;
  }
  arrival.envelope = std::make_unique<Envelope>();
  arrival.envelope->key = key;
  arrival.envelope->header = header;
  if (header.length > 0)
    arrival.envelope->payload.reset(new std::byte[header.length]);  // at most kEagerBytes
  return arrival;
}

Status ChannelState::end_eager(int source, const FrameHeader& header, Arrival arrival) {
  if (!failure_.ok() || !arrival.holds_credit) return {};
  if (!arrival.envelope) {
    give_credit(source, header.length);
    if (arrival.receive) finish_receive(*arrival.receive, source, header, header.length);
    return {};
  }
  // A receive may have been posted while the payload came.
  if (TransferStateRef receive = match(arrival.envelope->key)) {
    take(arrival.envelope.release(), receive);
  } else {
    keep(std::move(arrival.envelope));
  }
  return {};
}

Status ChannelState::on_request(Link& link, const FrameHeader& header) {
  if (!failure_.ok()) return {};
  const int source = link.peer();
  if (opened() && !has_member(source))
    return Status(Code::internal,
                  "a message on channel " + std::to_string(id_) + ", of which it is no member");
  if (Status status = hold_credit(source, 0); !status) return status;
  if (!check_call(source, header.call)) return {};
  const MatchKey key{source, header.call.sequence, header.tag};
  if (TransferStateRef receive = match(key)) {
    give_credit(source, 0);
    accept_request(link, header, receive);
    return {};
  }
  auto envelope = std::make_unique<Envelope>();
  envelope->key = key;
  envelope->header = header;
  keep(std::move(envelope));
  return {};
}

void ChannelState::on_withdraw(Link& link, std::uint64_t message) {
  Envelope* envelope = unexpected_.find_if([&](const Envelope& e) {
    return e.key.source == link.peer() && e.header.kind == FrameKind::request &&
           e.header.message == message;
  });
  if (envelope == nullptr) return;
  unexpected_.remove(envelope);
  delete envelope;
  give_credit(link.peer(), 0);
}

// ---- credit
// ----------------------------------------------------------------------------------------------------------

bool ChannelState::within_credit(const Flow& flow, std::size_t eager_bytes) {
  return flow.envelopes_held < kEnvelopeCredit && flow.eager_held + eager_bytes <= kEagerCredit;
}

void ChannelState::hold_credit(Flow& flow, std::size_t eager_bytes) {
  ++flow.envelopes_held;
  flow.eager_held += eager_bytes;
}

Status ChannelState::hold_credit(int source, std::size_t eager_bytes) {
  Flow& flow = flow_with(source);
  if (!within_credit(flow, eager_bytes))
    return Status(Code::internal,
                  "more messages on channel " + std::to_string(id_) + " than its credit allows");
  hold_credit(flow, eager_bytes);
  return {};
}

void ChannelState::give_credit(int source, std::size_t eager_bytes) {
  if (failure_.ok()) give_credit(source, flow_with(source), eager_bytes);
}

/// One envelope of `source`, with so many eager bytes, has been taken.
void ChannelState::give_credit(int source, Flow& flow, std::size_t eager_bytes) {
  ++flow.envelopes_due;
  flow.eager_due += eager_bytes;
  if (flow.envelopes_due < kEnvelopesDue && flow.eager_due < kEagerDue) return;
  FrameHeader credit;
  credit.kind = FrameKind::credit;
  credit.channel = id_;
  credit.tag = flow.envelopes_due;
  credit.amount = flow.eager_due;
  flow.envelopes_held -= flow.envelopes_due;
  flow.eager_held -= flow.eager_due;
  flow.envelopes_due = 0;
  flow.eager_due = 0;
  Link& link = engine_.link_to(source);
  link.protocol.push_control(credit);
  engine_.mark_dirty(link);
}

Status ChannelState::on_credit(Link& link, const FrameHeader& header) {
  if (!failure_.ok()) return {};
  Flow& flow = flow_with(link.peer());
  if (header.tag > kEnvelopeCredit - flow.envelopes_left ||
      header.amount > kEagerCredit - flow.eager_left) {
    return Status(Code::internal,
                  "more credit on channel " + std::to_string(id_) + " than was ever taken");
  }
  flow.envelopes_left += static_cast<std::uint32_t>(header.tag);
  flow.eager_left += static_cast<std::size_t>(header.amount);
  while (!flow.blocked.empty() && try_send(flow, flow.blocked.front())) flow.blocked.pop_front();
  return {};
}

}  // namespace muster::transport
