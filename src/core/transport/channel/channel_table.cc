// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/channel_table.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

namespace muster::transport {
namespace {

/// A forked child has copies of the parent's channels, but not its lock, watcher or peers.
TransferRef refused_in_child(bool sends) {
  auto transfer = std::make_shared<TransferState>();
  transfer->sends = sends;
  transfer->complete(Status(Code::aborted,
                            "a forked child cannot use its parent's process group; make one of its "
                            "own, or start the program anew"));
  return transfer;
}

}  // namespace

/// `wants_transfer`: create a transfer even if the message has been sent already.
TransferRef ChannelState::send(int member, std::uint64_t tag, ConstBytes data,
                               const Fingerprint& call, bool wants_transfer) {
  if (core_.engine.forked()) return refused_in_child(true);
  const PassLoop::LoopEntry entry(loop_);
  const bool valid = member >= 0 && member < size();
  std::size_t took = 0;
  if (valid && data.size() <= kEagerBytes) {
    const int rank = core_.members[static_cast<std::size_t>(member)];
    took = sender_.send_inline(rank, tag, data, call);
    if (took == sizeof(FrameHeader) + data.size())
      return wants_transfer ? sender_.sent_inline(rank) : nullptr;
  }
  TransferStateRef transfer = core_.start(true, valid ? member : kAnyMember, tag, call);
  transfer->out = data;
  if (took > 0) {
    sender_.queue_rest(transfer, took);
  } else if (!valid) {
    core_.finish(*transfer, Status(Code::invalid_argument,
                                   "a message was sent to member " + std::to_string(member) +
                                       " of a group of " + std::to_string(size())));
  } else {
    sender_.post(transfer);
  }
  return transfer;
}

TransferRef ChannelState::receive(int member, std::uint64_t tag, MutableBytes data,
                                  const Fingerprint& call, bool exact) {
  if (core_.engine.forked()) return refused_in_child(false);
  const PassLoop::LoopEntry entry(loop_);
  const bool valid =
      (member >= 0 && member < size()) || (member == kAnyMember && call.sequence == 0);
  TransferStateRef transfer = core_.start(false, valid ? member : kAnyMember, tag, call);
  transfer->in = data;
  transfer->exact = exact;
  if (!valid) {
    core_.finish(*transfer, Status(Code::invalid_argument,
                                   "a message was awaited from member " + std::to_string(member) +
                                       " of a group of " + std::to_string(size())));
  } else {
    receiver_.post(transfer);
  }
  return transfer;
}

TryReceive ChannelState::try_receive(int member, std::uint64_t tag, MutableBytes data,
                                     const Fingerprint& call) {
  if (call.sequence != 0 || member < 0 || member >= size() || core_.engine.forked())
    return TryReceive::needs_transfer;
  const PassLoop::LoopEntry entry(loop_);
  return receiver_.try_receive(core_.members[static_cast<std::size_t>(member)],
                               eager_header(core_.id, tag, data.size(), call), data);
}

void ChannelState::begin(const Fingerprint& call) {
  const PassLoop::LoopEntry entry(loop_);
  if (!core_.failure.ok() || call.sequence == 0) return;
  for (const auto& [source, theirs] : core_.calls.begin(call)) {
    if (!core_.check_call(source, theirs)) return;
  }
}

void ChannelState::compare(int member, const Fingerprint& call) {
  const PassLoop::LoopEntry entry(loop_);
  if (!core_.failure.ok() || member < 0 || member >= size()) return;
  core_.check_call(core_.members[static_cast<std::size_t>(member)], call);
}

void ChannelState::cancel(const TransferRef& transfer) {
  if (transfer->done()) return;
  const PassLoop::LoopEntry entry(loop_);
  auto& state = static_cast<TransferState&>(*transfer);
  if (state.stage == TransferState::Stage::finished) return;
  end(state, Status(Code::aborted, std::string(state.sends ? "the send to " : "the receive from ") +
                                       (state.rank < 0 ? "any rank" : rank_text(state.rank)) +
                                       " was taken back"));
}

void ChannelState::end(TransferState& transfer, const Status& cause) {
  receiver_.release(transfer);
  sender_.release(transfer);
  core_.finish(transfer, cause);
}

bool ChannelState::fail_locked(const Status& cause) {
  if (!core_.failure.ok()) return false;
  core_.failure = cause;
  failed_.store(true, std::memory_order_release);
  core_.credits.drop_blocked();  // at once, not one by one
  for (const TransferStateRef& transfer : core_.transfers.all()) end(*transfer, cause);
  core_.matcher.drop_all();
  core_.credits.clear();
  core_.calls.forget_early();
  core_.engine.pass.completed = true;
  return true;
}

void ChannelState::leave_locked(int rank, const Status& cause) {
  if (has_member(rank)) someone_left_.store(true, std::memory_order_release);
  core_.credits.drop_blocked(rank);
  // The messages that it has requested to send will never arrive.
  core_.matcher.drop_if([rank](const Envelope& e) {
    return e.key.source == rank && e.header.kind == FrameKind::request;
  });
  const bool alone = std::all_of(core_.members.begin(), core_.members.end(), [this](int m) {
    return m == core_.engine.rank() || !core_.why_gone(m).ok();
  });
  for (const TransferStateRef& transfer : core_.transfers.all()) {
    const bool hopeless =
        transfer->rank == rank || transfer->from == rank ||
        (transfer->rank < 0 && alone && transfer->stage == TransferState::Stage::posted);
    if (hopeless) end(*transfer, cause);
  }
}

void ChannelState::leave(int member, const Status& cause) {
  if (core_.engine.forked()) return;
  const PassLoop::LoopEntry entry(loop_);
  if (!core_.failure.ok() || member < 0 || member >= size() || member == position_) return;
  const int rank = core_.members[static_cast<std::size_t>(member)];
  if (core_.left.emplace(rank, cause).second) leave_locked(rank, cause);
}

void ChannelState::fail(Status cause) {
  if (cause.ok()) cause = Status(Code::internal, "a channel was failed without a cause");
  const PassLoop::LoopEntry entry(loop_);
  core_.engine.failures->on_channel_failure(core_.id, cause);
}

void ChannelState::open_locked(std::vector<int> members) {
  core_.members = std::move(members);
  for (std::size_t i = 0; i < core_.members.size(); ++i)
    core_.positions[core_.members[i]] = static_cast<int>(i);
  position_ = core_.position_of(core_.engine.rank());
  core_.matcher.drop_if([this](const Envelope& e) { return !has_member(e.key.source); });
  for (const int member : core_.members) {
    const RankStates& ranks = core_.engine.ranks;
    if (const Status& death = ranks.death(member); !death.ok()) fail_locked(death);
    if (!ranks.gone(member).ok()) someone_left_.store(true, std::memory_order_release);
  }
}

std::vector<int> ChannelState::awaited() const {
  const PassLoop::LoopEntry entry(loop_);
  std::vector<int> ranks;
  for (const TransferStateRef& transfer : core_.transfers.all()) {
    if (transfer->rank >= 0) {
      ranks.push_back(transfer->rank);
      continue;
    }
    for (const int member : core_.members) {
      if (member != core_.engine.rank()) ranks.push_back(member);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void ChannelTable::start() {
  std::vector<int> all_ranks(static_cast<std::size_t>(engine_.world_size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  bootstrap_ = channels_[0] = make(0);
  bootstrap_->open_locked(all_ranks);
  agreements_ = channels_[kAgreements] = make(kAgreements);
  agreements_->open_locked(std::move(all_ranks));
  used_ids_[0] = 0;
}

void ChannelTable::clear() {
  channels_.clear();
  bootstrap_.reset();
  agreements_.reset();
}

Status ChannelTable::check_members(const std::vector<int>& members) const {
  const int size = engine_.world_size();
  std::vector<bool> seen(static_cast<std::size_t>(size));
  for (const int member : members) {
    if (member < 0 || member >= size || seen[static_cast<std::size_t>(member)]) {
      return Status(Code::invalid_argument,
                    "a channel's members must be different ranks of the job; " +
                        std::to_string(member) + " is not, or is there twice");
    }
    seen[static_cast<std::size_t>(member)] = true;
  }
  if (seen[static_cast<std::size_t>(engine_.rank())]) return {};
  return Status(
      Code::invalid_argument,
      rank_text(engine_.rank()) + " is not among the members of the channel that it opens");
}

bool ChannelTable::was_used(std::uint32_t id) const {
  return std::prev(used_ids_.upper_bound(id))->second >= id;
}

/// Merges adjacent runs of used ids.
void ChannelTable::note_used(std::uint32_t id) {
  const auto next = used_ids_.upper_bound(id);
  const auto previous = std::prev(next);
  std::uint32_t last = id;
  if (next != used_ids_.end() && next->first == id + 1) {
    last = next->second;
    used_ids_.erase(next);
  }
  if (previous->second + 1 == id) {
    previous->second = last;
  } else {
    used_ids_[id] = last;
  }
}

Result<std::shared_ptr<ChannelState>> ChannelTable::open(std::uint32_t id,
                                                         std::vector<int> members) {
  if (Status status = check_members(members); !status) return status;
  if (id == kAgreements || was_used(id))
    return Status(Code::invalid_argument,
                  "channel " + std::to_string(id) + " has been used before");
  note_used(id);
  std::shared_ptr<ChannelState>& channel = channels_[id];
  if (channel) {
    --unopened_;
  } else {
    channel = make(id);
  }
  channel->open_locked(std::move(members));
  engine_.pass.completed = true;
  return channel;
}

void ChannelTable::retire(std::uint32_t id) {
  const auto found = channels_.find(id);
  if (found == channels_.end()) return;
  found->second->fail_locked(Status(Code::aborted, "the channel was closed"));
  channels_.erase(found);
}

/// Every rank has its own range of ids, so that no two ranks allocate the same one. Ids are
/// allocated in order, so that there are few runs.
std::uint32_t ChannelTable::next_id() {
  const std::uint32_t range = (kAgreements - 1) / static_cast<std::uint32_t>(engine_.world_size());
  const std::uint32_t first = 1 + range * static_cast<std::uint32_t>(engine_.rank());
  while (given_ids_ < range) {
    const std::uint32_t id = first + given_ids_++;
    if (!was_used(id)) return id;
  }
  return 0;  // the channel of all ranks: `open` says that it is taken
}

ChannelState* ChannelTable::find(std::uint32_t id) const {
  const auto found = channels_.find(id);
  return found == channels_.end() ? nullptr : found->second.get();
}

Result<ChannelState*> ChannelTable::for_frame(std::uint32_t id) {
  if (ChannelState* const channel = find(id)) return channel;
  if (was_used(id)) return static_cast<ChannelState*>(nullptr);
  if (unopened_ >= kMaxUnopened)
    return Status(Code::internal, "it has named more channels than may wait to be opened");
  ++unopened_;
  return (channels_[id] = make(id)).get();
}

void ChannelTable::fail_all(const Status& cause) {
  for (const auto& [id, channel] : channels_) channel->fail_locked(cause);
}

bool ChannelTable::needs(int rank) const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [rank](const auto& entry) { return entry.second->needs_locked(rank); });
}

}  // namespace muster::transport
