/// How transfers and channels end: completed, taken back, failed, left.
#include <algorithm>
#include <utility>

#include "muster/transport/channel_state.h"
#include "muster/transport/engine.h"

namespace muster::transport {

void ChannelState::unlink(TransferState& transfer) {
  (transfer.before == nullptr ? first_ : transfer.before->after) = transfer.after;
  if (transfer.after != nullptr) transfer.after->before = transfer.before;
  transfer.before = transfer.after = nullptr;
}

void ChannelState::finish(TransferState& transfer, Status status) {
  if (transfer.stage == TransferState::Stage::finished) return;
  const TransferStateRef keep = std::move(transfer.self);
  unlink(transfer);
  transfer.complete(std::move(status));
  engine_.note_completion();
}

void ChannelState::finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                                  std::size_t bytes) {
  if (transfer.stage == TransferState::Stage::finished) return;
  transfer.set_message(position_of(source), bytes, header.call);
  finish(transfer, Status());
}

void ChannelState::release_buffer(TransferState& transfer) {
  using Stage = TransferState::Stage;
  switch (transfer.stage) {
    case Stage::posted:
      if (transfer.rank < 0) {
        posted_any_.remove(&transfer);
      } else if (posted_.remove(&transfer)) {
        engine_.posted_from(transfer.rank, -1);
      }
      return;
    case Stage::arriving:
      if (Link* link = engine_.find_link(transfer.from)) link->abandon(transfer);
      return;
    case Stage::blocked: {
      auto& blocked = flow_with(transfer.rank).blocked;
      std::erase_if(blocked, [&](const TransferStateRef& t) { return t.get() == &transfer; });
      return;
    }
    case Stage::local:
      if (Envelope* envelope =
              unexpected_.find_if([&](const Envelope& e) { return e.local.get() == &transfer; })) {
        unexpected_.remove(envelope);
        delete envelope;
      }
      return;
    case Stage::queued:
    case Stage::requested:
    case Stage::streaming: {
      Link& link = *engine_.find_link(transfer.rank);
      const LinkProtocol::Detached detached = link.protocol.detach(&transfer);
      if (detached.message_dropped) {
        Flow& flow = flow_with(transfer.rank);
        ++flow.envelopes_left;
        flow.eager_left += transfer.out.size();
      }
      if (transfer.stage == Stage::queued) return;
      link.forget_request(transfer.message);
      if (transfer.stage == Stage::streaming && !detached.stream_cut) return;
      FrameHeader withdraw;
      withdraw.kind = FrameKind::withdraw;
      withdraw.channel = id_;
      withdraw.message = transfer.message;
      link.protocol.push_message(withdraw);
      engine_.mark_dirty(link);
      return;
    }
    case Stage::finished: return;
  }
}

void ChannelState::cancel(const TransferRef& transfer) {
  if (transfer->done()) return;
  Engine::Entry entry(engine_);
  auto& state = static_cast<TransferState&>(*transfer);
  if (state.stage == TransferState::Stage::finished) return;
  release_buffer(state);
  finish(state, Status(Code::aborted,
                       std::string(state.sends ? "the send to " : "the receive from ") +
                           (state.rank < 0 ? "any rank" : "rank " + std::to_string(state.rank)) +
                           " was taken back"));
}

std::vector<TransferStateRef> ChannelState::unfinished() const {
  std::vector<TransferStateRef> all;
  for (TransferState* transfer = first_; transfer != nullptr; transfer = transfer->after)
    all.push_back(transfer->self);
  std::reverse(all.begin(), all.end());
  return all;
}

bool ChannelState::fail_locked(const Status& cause) {
  if (!failure_.ok()) return false;
  failure_ = cause;
  failed_.store(true, std::memory_order_release);
  for (auto& [rank, flow] : flows_) flow.blocked.clear();  // at once, not one by one
  for (const TransferStateRef& transfer : unfinished()) {
    release_buffer(*transfer);
    finish(*transfer, cause);
  }
  drop_unexpected();
  forget_flows();
  early_.clear();
  engine_.note_completion();
  return true;
}

void ChannelState::leave_locked(int rank, const Status& cause) {
  if (has_member(rank)) someone_left_.store(true, std::memory_order_release);
  if (const auto flow = flows_.find(rank); flow != flows_.end()) flow->second.blocked.clear();
  // What it has asked to send will never come.
  while (Envelope* asked = unexpected_.find_if([rank](const Envelope& e) {
    return e.key.source == rank && e.header.kind == FrameKind::request;
  })) {
    unexpected_.remove(asked);
    delete asked;
  }
  const bool alone = std::all_of(members_.begin(), members_.end(), [&](int m) {
    return m == engine_.rank() || !engine_.gone(m).ok();
  });
  for (const TransferStateRef& transfer : unfinished()) {
    const bool hopeless =
        transfer->rank == rank || transfer->from == rank ||
        (transfer->rank < 0 && alone && transfer->stage == TransferState::Stage::posted);
    if (!hopeless) continue;
    release_buffer(*transfer);
    finish(*transfer, cause);
  }
}

bool ChannelState::needs_locked(int rank) const {
  for (const TransferState* transfer = first_; transfer != nullptr; transfer = transfer->after) {
    if (transfer->rank == rank || transfer->from == rank) return true;
  }
  return false;
}

void ChannelState::fail(Status cause) {
  if (cause.ok()) cause = Status(Code::internal, "a channel was failed without a cause");
  Engine::Entry entry(engine_);
  engine_.fail_channel(*this, cause);
}

Status ChannelState::failure() const { return failed() ? failure_ : Status(); }

void ChannelState::open_locked(std::vector<int> members) {
  members_ = std::move(members);
  for (std::size_t i = 0; i < members_.size(); ++i) positions_[members_[i]] = static_cast<int>(i);
  position_ = position_of(engine_.rank());
  while (Envelope* stray =
             unexpected_.find_if([this](const Envelope& e) { return !has_member(e.key.source); })) {
    unexpected_.remove(stray);
    delete stray;
  }
  for (const int member : members_) {
    if (const Status& death = engine_.death_locked(member); !death.ok()) fail_locked(death);
    if (!engine_.gone(member).ok()) someone_left_.store(true, std::memory_order_release);
  }
}

std::vector<int> ChannelState::awaited() const {
  Engine::Entry entry(engine_);
  std::vector<int> ranks;
  for (const TransferState* transfer = first_; transfer != nullptr; transfer = transfer->after) {
    if (transfer->rank >= 0) {
      ranks.push_back(transfer->rank);
      continue;
    }
    for (const int member : members_) {
      if (member != engine_.rank()) ranks.push_back(member);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace muster::transport
