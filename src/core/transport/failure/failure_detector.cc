// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/failure/failure_detector.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "core/base/log/log.h"
#include "core/transport/engine/engine_context.h"

namespace muster::transport {
namespace {

// Number of failures kept for streams that are established later.
constexpr std::size_t kNewsKept = 64;  // limit: memory

}  // namespace

void FailureNews::spread_channel_failure(std::uint32_t channel, std::span<const int> members,
                                         const Status& cause, int source) {
  FrameHeader header;
  header.kind = FrameKind::channel_failure;
  header.channel = channel;
  spread({members.begin(), members.end()}, header, encode_cause(cause), source);
}

void FailureNews::spread_rank_failure(int rank, const Status& cause, RankNews news, int source) {
  FrameHeader header;
  header.kind = FrameKind::rank_failure;
  header.message = static_cast<std::uint64_t>(rank);
  header.amount = static_cast<std::uint64_t>(news);
  std::vector<int> all_ranks(static_cast<std::size_t>(engine_.world_size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  spread(std::move(all_ranks), header, encode_cause(cause), source);
}

void FailureNews::spread(std::vector<int> members, const FrameHeader& header, std::string record,
                         int source) {
  News news{std::move(members), header, std::move(record)};
  tell(news, source);
  told_.push_back(std::move(news));
  if (told_.size() > kNewsKept) told_.pop_front();
}

/// Sends over every established link, and to the members at distances 1, 2, 4, ..., whose links are
/// opened for it. Each rank forwards the news once in the same way, so all receive it in
/// logarithmically many steps, even if some die in between.
void FailureNews::tell(const News& news, int source) {
  const std::vector<int>& members = news.members;
  const auto size = static_cast<int>(members.size());
  const auto me =
      static_cast<int>(std::find(members.begin(), members.end(), engine_.rank()) - members.begin());
  if (me == size) return;
  const auto is_gone = [&](int position) {
    return !engine_.ranks.gone(members[static_cast<std::size_t>(position)]).ok();
  };
  std::vector<bool> finger(members.size());
  for (int distance = 1; distance < size; distance *= 2) {
    int at = (me + distance) % size;
    while (at != me && is_gone(at)) at = (at + 1) % size;
    finger[static_cast<std::size_t>(at)] = true;
  }
  for (int i = 0; i < size; ++i) {
    const int member = members[static_cast<std::size_t>(i)];
    if (i == me || member == source || is_gone(i)) continue;
    const Link* const link = links_.find(member);
    if (finger[static_cast<std::size_t>(i)] || (link != nullptr && link->up_or_connecting()))
      links_.writer.push_control(links_.to(member), news.header, news.record);
  }
}

void FailureNews::tell_earlier(Link& link) {
  for (const News& news : told_) {
    if (news.header.kind == FrameKind::rank_failure &&
        news.header.message == static_cast<std::uint64_t>(link.peer()))
      continue;
    if (std::find(news.members.begin(), news.members.end(), link.peer()) == news.members.end())
      continue;
    link.protocol.out.push_control(news.header, news.record);
  }
}

namespace {

// After an end of stream without a close frame, wait this long for a cause, so that the first rank
// to give up is not blamed.
constexpr Duration kHoldForCause = std::chrono::milliseconds(20);  // limit: news on their way
// The same if a local rank has stated that it gave up: its cause is on its way.
constexpr Duration kHoldForAborted = std::chrono::milliseconds(500);  // limit: news on their way
// After a rank has reported its own failure, calls that it had already entered may continue this
// long.
constexpr Duration kHoldOwnFailure = std::chrono::milliseconds(50);  // limit: calls about to end
// A failure may explain the loss of another rank for this long, unless that rank has sent messages
// since. Messages that were in flight do not count.
constexpr Duration kCauseExplains = std::chrono::seconds(2);   // limit: patience
constexpr Duration kInFlight = std::chrono::milliseconds(50);  // limit: messages in flight

}  // namespace

// ---- what is seen of a rank

void FailureDetector::on_stream_end(Link& link, const Status& why) {
  const int peer = link.peer();
  const std::string kind = link.up() ? link.stream->kind() : "closed";
  const Status reason = why;  // it may be the link's own
  links_.close(link);
  link.ended = reason;
  if (!engine_.ranks.gone(peer).ok()) return;
  const PeerState state = peer_state_of(engine_, peer);
  if (link.close.received) return leave(peer);
  if (has_left(state)) return suspect_left(peer);
  if (reason.code() == Code::internal) return declare_dead(peer, reason);
  if (reason.code() == Code::refused)
    return declare_dead(peer, Status(Code::peer_failed,
                                     "the " + kind + " connection to " + rank_text(peer) +
                                         " is cut: " + reason.message(),
                                     {peer}));
  suspect(peer, state == PeerState::troubled ? kHoldForAborted : kHoldForCause,
          Status(Code::peer_failed,
                 rank_text(peer) + " is gone: its " + kind +
                     " connection ended without a close message (" + reason.message() +
                     "); its process has probably died, look at the end of its output" +
                     (kind == "tcp" ? ", or the connection was cut on the network" : ""),
                 {peer}));
}

void FailureDetector::on_death(int peer, Status evidence) {
  Link* link = links_.find(peer);
  // First read what it sent before its end: a cause, or a close frame.
  constexpr int kMostReads = 1000;  // limit: a peer that never stops talking
  for (int i = 0; i < kMostReads && link != nullptr && link->up() && !link->flags.in_service; ++i) {
    if (!links_.poller.read(*link)) break;
  }
  if (!engine_.ranks.gone(peer).ok()) return;
  const PeerState state = peer_state_of(engine_, peer);
  if (link != nullptr && link->close.received) return leave(peer);
  if (has_left(state)) return suspect_left(peer);
  if (state == PeerState::working) return declare_dead(peer, evidence);
  if (state == PeerState::troubled)
    return suspect(peer, explanation(peer) ? Duration::zero() : kHoldForAborted, evidence);
  if (link != nullptr) return blame(peer, evidence);
  // No link and no statement: it may have left in good order. Only a rank that needs it may declare
  // it dead.
  if (channels_.needs(peer)) return suspect(peer, kHoldForCause, evidence);
  engine_.ranks.note_unneeded_death(peer, std::move(evidence));
}

void FailureDetector::on_needed(int rank) {
  if (const auto evidence = engine_.ranks.take_unneeded_death(rank)) blame(rank, *evidence);
}

void FailureDetector::on_connect_failed(int peer, const Status& cause) {
  Link* link = links_.find(peer);
  if (link == nullptr || link->up()) return;
  link->flags.connecting = false;
  if (!engine_.ranks.gone(peer).ok() || engine_.own.closing) return;
  const Status evidence(
      cause.code() == Code::refused || cause.code() == Code::exhausted ? cause.code()
                                                                       : Code::peer_failed,
      rank_text(engine_.rank()) + " cannot reach " + rank_text(peer) + ": " + cause.message(),
      cause.ranks().empty() ? std::vector<int>{peer} : cause.ranks());
  if (evidence.code() == Code::peer_failed) {
    if (channels_.needs(peer)) return suspect(peer, kHoldForCause, evidence);
    // It may have left in good order and told its neighbours, which have left too. Only a rank that
    // needs it may declare it dead.
    return engine_.ranks.note_unneeded_death(peer, evidence);
  }
  // Not the peer's fault, or not a death: fail the channels that need the connection, with the
  // reason.
  std::vector<std::shared_ptr<ChannelState>> hit;
  for (const auto& [id, channel] : channels_.all()) {
    if (channel->needs_locked(peer)) hit.push_back(channel);
  }
  for (const auto& channel : hit) fail_channel(*channel, evidence, -1);
}

void FailureDetector::on_close(Link& link, bool unclosed) {
  link.close.received = true;
  link.close.unclosed = unclosed;
  FrameHeader answer;
  answer.kind = FrameKind::close_ack;
  links_.writer.push_control(link, answer);
  leave(link.peer());
}

/// `rank` has ended and stated so: only transfers that wait for it fail.
void FailureDetector::leave(int rank) {
  if (!engine_.ranks.gone(rank).ok()) return;
  const Link* link = links_.find(rank);
  const bool unclosed = (link != nullptr && link->close.unclosed) ||
                        peer_state_of(engine_, rank) == PeerState::left_unclosed;
  std::string how = " has left the job in good order (it closed its process group)";
  if (unclosed) {
    how = "'s process has ended, and called no destroy_process_group before";
    if (const auto trouble = troubles_.find(rank); trouble != troubles_.end())
      how += " (" + trouble->second + ")";
  }
  const Status cause(Code::closed, rank_text(rank) + how + "; nothing more comes from it", {rank});
  engine_.ranks.set_gone(rank, cause);
  suspects_.erase(rank);
  for (const auto& [id, channel] : channels_.all()) channel->leave_locked(rank, cause);
  engine_.pass.completed = true;
}

// ---- who is to blame

void FailureDetector::note_cause(const Status& cause) {
  if (engine_.own.closing) return;
  cause_ = cause;
  cause_at_ = engine_.now();
  engine_.pass.knows_failure = true;
  engine_.mailbox().troubled.store(1, std::memory_order_release);
  engine_.pass.completed = true;
}

void FailureDetector::forget_old_cause(TimePoint now) {
  if (!cause_.ok() && now - cause_at_ > kCauseExplains)
    engine_.mailbox().troubled.store(0, std::memory_order_release);
}

/// The earlier failure that is probably why `rank` gave up.
std::optional<Status> FailureDetector::explanation(int rank) const {
  if (cause_.ok() || engine_.now() - cause_at_ > kCauseExplains) return std::nullopt;
  const std::vector<int>& culprits = cause_.ranks();
  if (std::find(culprits.begin(), culprits.end(), rank) != culprits.end()) return std::nullopt;
  const Link* link = links_.find(rank);
  if (link != nullptr && link->times.last_message > cause_at_ + kInFlight) return std::nullopt;
  return Status(cause_.code(),
                rank_text(rank) + " gave up after an earlier failure: " + cause_.message(),
                culprits);
}

void FailureDetector::blame(int rank, const Status& evidence) {
  const auto earlier = explanation(rank);
  declare_dead(rank, earlier ? *earlier : evidence);
}

void FailureDetector::suspect(int rank, Duration hold, Status evidence) {
  const TimePoint judge_at = engine_.now() + hold;
  suspects_.try_emplace(rank, Suspect{judge_at, std::move(evidence)});
  engine_.pass.schedule(judge_at);
}

void FailureDetector::suspect_left(int rank) {
  suspect(rank, kHoldForCause, Status(Code::closed, "it has left", {rank}));
}

void FailureDetector::judge_suspects(TimePoint now) {
  for (auto it = suspects_.begin(); it != suspects_.end();) {
    if (it->second.judge_at > now) {
      engine_.pass.schedule(it->second.judge_at);
      ++it;
      continue;
    }
    const int rank = it->first;
    const Status evidence = std::move(it->second.evidence);
    suspects_.erase(it);
    if (engine_.ranks.gone(rank).ok()) {
      evidence.code() == Code::closed ? leave(rank) : blame(rank, evidence);
    } else if (engine_.ranks.death(rank).ok() && !engine_.own.closing) {
      end_failed_rank(rank);
    }
    it = suspects_.upper_bound(rank);
  }
}

// ---- deaths

void FailureDetector::declare_dead(int rank, const Status& evidence) {
  RankStates& ranks = engine_.ranks;
  if (!ranks.death(rank).ok() || rank == engine_.rank()) return;
  const bool had_left = !ranks.gone(rank).ok();
  const Status cause = evidence;  // it may be a suspect's own
  // Recorded before any channel fails: code that this calls finds the rank gone, and a second
  // verdict returns above.
  ranks.set_dead(rank, cause);
  ranks.set_gone(rank, cause);
  ranks.forget_unneeded_death(rank);
  suspects_.erase(rank);
  if (had_left || engine_.own.closing) return;  // nothing depends on it any more
  if (logs(LogLevel::info)) log(LogLevel::info, cause.message());
  note_cause(cause);
  for (const auto& [id, channel] : channels_.all()) {
    if (!channel->has_member(rank)) continue;
    if (channels_.is_agreements(channel)) {
      channel->leave_locked(rank, cause);
    } else {
      channel->fail_locked(cause);
    }
  }
  end_stream(rank, cause);
  news_.spread_rank_failure(rank, cause, RankNews::lost, rank);
  engine_.pass.completed = true;
}

void FailureDetector::end_stream(int rank, const Status& cause) {
  Link* const link = links_.find(rank);
  if (link == nullptr) return;
  links_.close(*link);
  if (link->ended.ok()) link->ended = cause;
}

/// `rank` has reported its own failure. Transfers that need it fail at once, all others 50 ms
/// later: calls that it had already entered may still succeed.
void FailureDetector::on_own_word(int source, int rank, const Status& cause) {
  if (!engine_.ranks.gone(rank).ok() || engine_.own.closing) return;
  engine_.ranks.set_gone(rank, cause);
  engine_.ranks.forget_unneeded_death(rank);
  if (logs(LogLevel::info)) log(LogLevel::info, cause.message());
  note_cause(cause);
  for (const auto& [id, channel] : channels_.all()) channel->leave_locked(rank, cause);
  news_.spread_rank_failure(rank, cause, RankNews::failed, source);
  if (Link* link = links_.find(rank);
      link != nullptr && source == rank) {  // it waits for the acknowledgement
    FrameHeader answer;
    answer.kind = FrameKind::close_ack;
    links_.writer.push_control(*link, answer);
  }
  const TimePoint judge_at = engine_.now() + kHoldOwnFailure;
  suspects_.insert_or_assign(rank, Suspect{judge_at, cause});
  engine_.pass.schedule(judge_at);
}

void FailureDetector::end_failed_rank(int rank) {
  const Status cause = engine_.ranks.gone(rank);
  engine_.ranks.set_dead(rank, cause);
  for (const auto& [id, channel] : channels_.all()) {
    if (!channels_.is_agreements(channel) && channel->has_member(rank)) channel->fail_locked(cause);
  }
  end_stream(rank, cause);
  engine_.pass.completed = true;
}

void FailureDetector::on_told_rank_failure(int source, int rank, const Status& cause,
                                           RankNews news) {
  if (rank != engine_.rank()) {
    switch (news) {
      case RankNews::lost: return declare_dead(rank, cause);
      case RankNews::failed: return on_own_word(source, rank, cause);
      case RankNews::trouble:
        if (!engine_.own.closing && troubles_.emplace(rank, cause.message()).second)
          news_.spread_rank_failure(rank, cause, news, source);
        return;
    }
  }
  if (news == RankNews::trouble) return;  // this rank's own news, forwarded by another
  // The others continue without this rank, so it must fail too.
  const Status fenced(Code::peer_failed,
                      "the other ranks have given this rank (" + std::to_string(rank) +
                          ") up, says " + rank_text(source) + ": " + cause.message(),
                      {rank});
  for (const auto& [id, channel] : channels_.all()) {
    if (channel->size() > 1) channel->fail_locked(fenced);
  }
  note_cause(fenced);
}

/// A rank that fails just after it has learned of another's failure gave up because of that.
void FailureDetector::fail_this_rank(const std::string& why, const std::vector<int>& earlier) {
  const int me = engine_.rank();
  const auto first = explanation(me);
  Status cause(Code::peer_failed, rank_text(me) + " failed: " + why, {me});
  if (!earlier.empty() && std::ranges::find(earlier, me) == earlier.end()) {
    cause = Status(Code::peer_failed, rank_text(me) + " gave up after an earlier failure: " + why,
                   earlier);
  } else if (first) {
    cause = *first;
  }
  channels_.fail_all(cause);
  note_cause(cause);
  news_.spread_rank_failure(me, cause, RankNews::failed, -1);
}

void FailureDetector::tell_trouble(const std::string& trouble) {
  const int me = engine_.rank();
  news_.spread_rank_failure(me, Status(Code::closed, trouble, {me}), RankNews::trouble, -1);
}

// ---- channels

void FailureDetector::on_channel_failure(std::uint32_t channel, const Status& cause) {
  if (ChannelState* const failed = channels_.find(channel)) fail_channel(*failed, cause, -1);
}

void FailureDetector::fail_channel(ChannelState& channel, const Status& cause, int source) {
  if (!channel.fail_locked(cause)) return;
  note_cause(cause);
  news_.spread_channel_failure(channel.id(), channel.members(), cause, source);
}

}  // namespace muster::transport
