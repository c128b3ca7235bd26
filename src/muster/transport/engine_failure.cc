#include <algorithm>

#include "muster/base/log.h"
#include "muster/transport/engine.h"
#include "muster/transport/watcher.h"

namespace muster::transport {
namespace {

// An end of stream without a goodbye waits this long for a cause, so that nobody blames the first
// to give up.
constexpr Duration kHoldForCause = std::chrono::milliseconds(20);
// A local rank that has said itself that it gave up: its cause is on its way.
constexpr Duration kHoldForGivenUp = std::chrono::milliseconds(500);
// A rank has said that it has failed: so long the calls for which it had come may go on.
constexpr Duration kHoldOwnFailure = std::chrono::milliseconds(50);
// So long a cause may explain why somebody else went, unless that one has sent messages since;
// those that were in flight do not count.
constexpr Duration kCauseExplains = std::chrono::seconds(2);
constexpr Duration kInFlight = std::chrono::milliseconds(50);
// Failures that a stream which comes up later still hears of.
constexpr std::size_t kNewsKept = 64;

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

// ---- what others see of a rank
// ---------------------------------------------------------------------------------------

Engine::Word Engine::word_of(int rank) {
  if (region_ == nullptr || !in_region(rank)) return Word::unknown;
  const shm::Mailbox& theirs = region_->mailbox(local_position_[static_cast<std::size_t>(rank)]);
  switch (theirs.aborted.load(std::memory_order_acquire)) {
    case shm::Mailbox::kLeft: return Word::left;
    case shm::Mailbox::kUnclosed: return Word::left_unclosed;
    default: break;
  }
  return theirs.troubled.load(std::memory_order_acquire) != 0 ? Word::troubled : Word::working;
}

void Engine::stream_ended(Link& link, Status why) {
  const int peer = link.peer();
  const std::string kind = link.up() ? link.stream->kind() : "closed";
  close_stream(link);
  link.ended = why;
  if (!gone(peer).ok()) return;
  const Word said = word_of(peer);
  if (link.goodbye) return leave(peer);
  if (said == Word::left || said == Word::left_unclosed) return suspect_left(peer);
  if (why.code() == Code::internal) return declare_dead_locked(peer, why);
  suspect(
      peer, said == Word::troubled ? kHoldForGivenUp : kHoldForCause,
      Status(Code::peer_failed,
             rank_text(peer) + " is gone: its " + kind + " connection ended without a goodbye (" +
                 why.message() + "); its process has probably died, look at the end of its output",
             {peer}));
}

void Engine::on_death(int peer, Status evidence) {
  Link* link = find_link(peer);
  // Its last words first: a cause, or a goodbye.
  for (int i = 0; i < 1000 && link != nullptr && link->up() && !link->in_service; ++i) {
    if (!service_read(*link)) break;
  }
  if (!gone(peer).ok()) return;
  const Word said = word_of(peer);
  if (link != nullptr && link->goodbye) return leave(peer);
  if (said == Word::left || said == Word::left_unclosed) return suspect_left(peer);
  if (said == Word::working) return declare_dead_locked(peer, evidence);
  if (said == Word::troubled)
    return suspect(peer, explanation(peer) ? Duration::zero() : kHoldForGivenUp, evidence);
  if (link != nullptr) return blame(peer, evidence);
  // No link and no word: it may have left in good order. Only who needs it may judge.
  if (needed(peer)) return suspect(peer, kHoldForCause, evidence);
  unneeded_deaths_[peer] = std::move(evidence);
}

void Engine::now_needed(int rank) {
  if (unneeded_deaths_.empty()) return;
  const auto found = unneeded_deaths_.find(rank);
  if (found == unneeded_deaths_.end()) return;
  const Status evidence = std::move(found->second);
  unneeded_deaths_.erase(found);
  blame(rank, evidence);
}

bool Engine::needed(int rank) const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [rank](const auto& entry) { return entry.second->needs_locked(rank); });
}

void Engine::on_connect_failed(int peer, Status cause) {
  Link* link = find_link(peer);
  if (link == nullptr || link->up()) return;
  link->connecting = false;
  if (!gone(peer).ok() || closing_) return;
  const Status evidence(
      cause.code() == Code::refused || cause.code() == Code::exhausted ? cause.code()
                                                                       : Code::peer_failed,
      rank_text(rank()) + " cannot reach " + rank_text(peer) + ": " + cause.message(),
      cause.ranks().empty() ? std::vector<int>{peer} : cause.ranks());
  if (evidence.code() == Code::peer_failed) {
    if (needed(peer)) return suspect(peer, kHoldForCause, evidence);
    // It may have left in good order and told its neighbours, who have left too. Only who needs it
    // may judge.
    unneeded_deaths_[peer] = evidence;
    return;
  }
  // Not the peer's fault, or not a death: whoever wanted the connection learns why there is none.
  std::vector<std::shared_ptr<ChannelState>> hit;
  for (auto& [id, channel] : channels_) {
    if (channel->needs_locked(peer)) hit.push_back(channel);
  }
  for (auto& channel : hit) fail_channel(*channel, evidence);
}

void Engine::on_goodbye(Link& link, bool unclosed) {
  link.goodbye = true;
  link.unclosed = unclosed;
  FrameHeader farewell;
  farewell.kind = FrameKind::farewell;
  link.protocol.push_control(farewell);
  mark_dirty(link);
  leave(link.peer());
}

bool Engine::left_unclosed(int rank) {
  const Link* link = find_link(rank);
  return (link != nullptr && link->unclosed) || word_of(rank) == Word::left_unclosed;
}

/// `rank` has ended and said so: only what waits for it ends with it.
void Engine::leave(int rank) {
  if (!gone(rank).ok()) return;
  const char* how = left_unclosed(rank) ? "'s process has ended, and called no "
                                          "destroy_process_group before; nothing more comes from it"
                                        : " has left the job in good order (it closed its process "
                                          "group); nothing more comes from it";
  const Status cause(Code::closed, rank_text(rank) + how, {rank});
  gone_[static_cast<std::size_t>(rank)] = cause;
  suspects_.erase(rank);
  for (auto& [id, channel] : channels_) channel->leave_locked(rank, cause);
  completed_ = true;
}

// ---- who is to blame
// -------------------------------------------------------------------------------------------------

void Engine::note_cause(const Status& cause) {
  if (closing_) return;
  cause_ = cause;
  cause_at_ = clock().now();
  connector_->mailbox().troubled.store(1, std::memory_order_release);
  completed_ = true;
}

/// The earlier failure because of which `rank` has probably given up.
std::optional<Status> Engine::explanation(int rank) const {
  if (cause_.ok() || clock().now() - cause_at_ > kCauseExplains) return std::nullopt;
  const std::vector<int>& culprits = cause_.ranks();
  if (std::find(culprits.begin(), culprits.end(), rank) != culprits.end()) return std::nullopt;
  const Link* link = links_[static_cast<std::size_t>(rank)].get();
  if (link != nullptr && link->last_message > cause_at_ + kInFlight) return std::nullopt;
  return Status(cause_.code(),
                rank_text(rank) + " gave up after an earlier failure: " + cause_.message(),
                culprits);
}

void Engine::blame(int rank, const Status& evidence) {
  const auto earlier = explanation(rank);
  declare_dead_locked(rank, earlier ? *earlier : evidence);
}

void Engine::suspect(int rank, Duration hold, Status evidence) {
  const TimePoint judge_at = clock().now() + hold;
  suspects_.try_emplace(rank, Suspect{judge_at, std::move(evidence)});
  schedule(judge_at);
}

/// Its mailbox says that it has ended in good order; its goodbye has not come. Why it ended, a
/// failure that it knows of and we do not, may still be on its way, over a stream that stands only
/// later or from another rank.
void Engine::suspect_left(int rank) {
  suspect(rank, kHoldForCause, Status(Code::closed, "it has left", {rank}));
}

void Engine::judge_suspects(TimePoint now) {
  for (auto it = suspects_.begin(); it != suspects_.end();) {
    if (it->second.judge_at > now) {
      schedule(it->second.judge_at);
      ++it;
      continue;
    }
    const int rank = it->first;
    const Status evidence = std::move(it->second.evidence);
    suspects_.erase(it);
    if (gone(rank).ok()) {
      evidence.code() == Code::closed ? leave(rank) : blame(rank, evidence);
    } else if (death_locked(rank).ok() && !closing_) {
      end_own_failure(rank);
    }
    it = suspects_.upper_bound(rank);
  }
}

// ---- deaths
// ----------------------------------------------------------------------------------------------------------

Status Engine::death_of(int rank) {
  if (rank < 0 || rank >= world_size()) return {};
  Entry entry(*this);
  return death_locked(rank);
}

Status Engine::why_gone(int rank) {
  if (rank < 0 || rank >= world_size()) return {};
  Entry entry(*this);
  return gone(rank);
}

/// What the others are told of this rank's own failure. A rank that has just heard of another's
/// failure gave up because of that.
Status Engine::own_failure(const std::string& why, const std::vector<int>& earlier) const {
  const std::string gave_up = rank_text(rank()) + " gave up after an earlier failure: ";
  if (!earlier.empty() && std::ranges::find(earlier, rank()) == earlier.end())
    return Status(Code::peer_failed, gave_up + why, earlier);
  if (const auto first = explanation(rank())) return *first;
  return Status(Code::peer_failed, rank_text(rank()) + " failed: " + why, {rank()});
}

void Engine::declare_dead(int rank, Status evidence) {
  if (rank < 0 || rank >= world_size() || rank == this->rank() || evidence.ok()) return;
  Entry entry(*this);
  declare_dead_locked(rank, evidence);
}

void Engine::declare_dead_locked(int rank, const Status& evidence) {
  Status& death = deaths_[static_cast<std::size_t>(rank)];
  if (!death.ok() || rank == this->rank()) return;
  const bool had_left = !gone(rank).ok();
  death = evidence;
  gone_[static_cast<std::size_t>(rank)] = evidence;
  suspects_.erase(rank);
  unneeded_deaths_.erase(rank);
  if (had_left || closing_) return;  // nothing depends on it any more
  if (logs(LogLevel::info)) log(LogLevel::info, evidence.message());
  note_cause(evidence);
  for (auto& [id, channel] : channels_) {
    if (!channel->has_member(rank)) continue;
    if (channel == agreements_) {
      channel->leave_locked(rank, evidence);
    } else {
      channel->fail_locked(evidence);
    }
  }
  if (Link* link = find_link(rank)) {
    close_stream(*link);
    if (link->ended.ok()) link->ended = evidence;
  }
  FrameHeader header;
  header.kind = FrameKind::rank_failure;
  header.message = static_cast<std::uint64_t>(rank);
  spread(bootstrap_->members(), header, encode_cause(evidence), rank);
  completed_ = true;
}

/// What needs `rank` fails at once, everything else a moment later: calls for which it had come may
/// still end well.
void Engine::on_own_failure(int source, int rank, const Status& cause) {
  if (!gone(rank).ok() || closing_) return;
  gone_[static_cast<std::size_t>(rank)] = cause;
  unneeded_deaths_.erase(rank);
  if (logs(LogLevel::info)) log(LogLevel::info, cause.message());
  note_cause(cause);
  for (auto& [id, channel] : channels_) channel->leave_locked(rank, cause);
  FrameHeader header;
  header.kind = FrameKind::rank_failure;
  header.message = static_cast<std::uint64_t>(rank);
  header.amount = 1;
  spread(bootstrap_->members(), header, encode_cause(cause), source);
  if (Link* link = find_link(rank); link != nullptr && source == rank) {  // it waits to be heard
    FrameHeader farewell;
    farewell.kind = FrameKind::farewell;
    link->protocol.push_control(farewell);
    mark_dirty(*link);
  }
  const TimePoint judge_at = clock().now() + kHoldOwnFailure;
  suspects_.insert_or_assign(rank, Suspect{judge_at, cause});
  schedule(judge_at);
}

void Engine::end_own_failure(int rank) {
  const Status& cause = gone(rank);
  deaths_[static_cast<std::size_t>(rank)] = cause;
  for (auto& [id, channel] : channels_) {
    if (channel != agreements_ && channel->has_member(rank)) channel->fail_locked(cause);
  }
  if (Link* link = find_link(rank)) {
    close_stream(*link);
    if (link->ended.ok()) link->ended = cause;
  }
  completed_ = true;
}

void Engine::on_rank_failure(int source, int rank, const Status& cause, bool says_so_itself) {
  if (rank != this->rank())
    return says_so_itself ? on_own_failure(source, rank, cause) : declare_dead_locked(rank, cause);
  // The others go on without us; so must we end.
  const Status fenced(Code::peer_failed,
                      "the other ranks have given this rank (" + std::to_string(rank) +
                          ") up, says " + rank_text(source) + ": " + cause.message(),
                      {rank});
  for (auto& [id, channel] : channels_) {
    if (channel->size() > 1) channel->fail_locked(fenced);
  }
  note_cause(fenced);
}

/// Passes news on: over every link that stands, and to the members at distances 1, 2, 4, ... whose
/// links are opened for it. Since whoever hears it first does the same, all hear it in
/// logarithmically many steps, also when some of them die on the way.
void Engine::tell(std::span<const int> members, const FrameHeader& header,
                  const std::string& record, int source) {
  const auto size = static_cast<int>(members.size());
  const auto me =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  if (me == size) return;
  std::vector<bool> finger(members.size());
  for (int distance = 1; distance < size; distance *= 2) {
    int at = (me + distance) % size;
    while (at != me && !gone(members[static_cast<std::size_t>(at)]).ok()) at = (at + 1) % size;
    finger[static_cast<std::size_t>(at)] = true;
  }
  for (int i = 0; i < size; ++i) {
    const int member = members[static_cast<std::size_t>(i)];
    if (i == me || member == source || !gone(member).ok()) continue;
    const Link* stands = find_link(member);
    if (!finger[static_cast<std::size_t>(i)] &&
        (stands == nullptr || !(stands->up() || stands->connecting)))
      continue;
    Link& link = link_to(member);
    link.protocol.push_control(header, record);
    mark_dirty(link);
  }
}

/// Tells now, and keeps it for streams that come up later.
void Engine::spread(std::span<const int> members, const FrameHeader& header, std::string record,
                    int source) {
  tell(members, header, record, source);
  news_.push_back({std::vector<int>(members.begin(), members.end()), header, std::move(record)});
  if (news_.size() > kNewsKept) news_.pop_front();
}

void Engine::fail_channel(ChannelState& channel, const Status& cause, int source) {
  if (!channel.fail_locked(cause)) return;
  note_cause(cause);
  spread_failure(channel, cause, source);
}

void Engine::spread_failure(const ChannelState& channel, const Status& cause, int source) {
  FrameHeader header;
  header.kind = FrameKind::channel_failure;
  header.channel = channel.id();
  spread(channel.members(), header, encode_cause(cause), source);
}

/// To a peer without a stream so far: what it would have been told. Else our goodbye may be the
/// first that it hears.
void Engine::tell_old_news(Link& link) {
  for (const News& news : news_) {
    if (news.header.kind == FrameKind::rank_failure &&
        news.header.message == static_cast<std::uint64_t>(link.peer()))
      continue;
    if (std::find(news.members.begin(), news.members.end(), link.peer()) == news.members.end())
      continue;
    link.protocol.push_control(news.header, news.record);
  }
}

// ---- heartbeats
// ------------------------------------------------------------------------------------------------------

void Engine::suspend_heartbeats(bool on) {
  Entry entry(*this);
  suspended_ += on ? 1 : -1;
}

/// The nearest rank in the ring of all ranks that is still there; -1 where there is none.
int Engine::ring_neighbour(int step) const {
  const int size = world_size();
  for (int at = (rank() + step + size) % size; at != rank(); at = (at + step + size) % size) {
    if (gone(at).ok()) return at;
  }
  return -1;
}

/// What is due by the clock.
void Engine::duties(TimePoint now) {
  next_duty_ = TimePoint::max();
  judge_suspects(now);
  if (world_size() == 1 || closing_) return;
  if (now >= next_beat_) beat(now);
  schedule(next_beat_);
}

void Engine::beat(TimePoint now) {
  // Where this rank was itself held up, what it has not heard meanwhile says nothing of the others.
  const bool late = now - last_beat_ > 3 * interval_;
  const bool judge = options_.heartbeat_limit > Duration::zero() && suspended_ == 0;
  last_beat_ = now;
  next_beat_ =
      now +
      (options_.heartbeat_limit > Duration::zero() ? interval_ : Duration(std::chrono::seconds(1)));
  // It has not given up, after all.
  if (!cause_.ok() && now - cause_at_ > kCauseExplains)
    connector_->mailbox().troubled.store(0, std::memory_order_release);
  watch_ring();
  beat_links(now, judge && !late);
  beat_mailboxes(now, judge && !late);
}

/// Somebody always has a link to each rank: the one before it in the ring, where its host does not
/// watch it anyway.
void Engine::watch_ring() {
  const int next = ring_neighbour(1);
  if (next >= 0 && !in_region(next)) link_to(next);
}

void Engine::beat_links(TimePoint now, bool judge) {
  const int next = ring_neighbour(1);
  const int previous = ring_neighbour(-1);
  std::vector<int> silent;
  for (auto& link : links_) {
    if (!link || !link->up() || in_region(link->peer())) continue;
    const int peer = link->peer();
    const bool matters = peer == next || peer == previous || link->busy() ||
                         posted_from_[static_cast<std::size_t>(peer)] > 0;
    if (!judge && link->asked != TimePoint{}) link->asked = now;
    if (!matters || now - link->heard < interval_) continue;
    if (link->asked == TimePoint{}) {
      link->asked = now;
    } else if (judge && now - link->asked > options_.heartbeat_limit - interval_) {
      silent.push_back(peer);
      continue;
    }
    if (!link->protocol.queued(FrameKind::ping)) {
      FrameHeader ping;
      ping.kind = FrameKind::ping;
      link->protocol.push_control(ping);
      mark_dirty(*link);
    }
  }
  for (const int peer : silent) {
    const Duration silence = now - links_[static_cast<std::size_t>(peer)]->heard;
    declare_dead_locked(
        peer, Status(Code::peer_failed,
                     rank_text(peer) + " has not answered for " + muster::describe(silence) +
                         ": it is stopped, hung or unreachable",
                     {peer}));
  }
}

/// Within a host: each rank's counter grows while its watcher runs, and the next rank of the region
/// looks at it.
void Engine::beat_mailboxes(TimePoint now, bool judge) {
  connector_->mailbox().heartbeat.fetch_add(1, std::memory_order_relaxed);
  if (region_ == nullptr) return;
  const auto ranks = region_->ranks();
  const auto size = static_cast<int>(ranks.size());
  int next = -1;
  for (int step = 1; step < size && next < 0; ++step) {
    const int position = (region_->local_rank() + step) % size;
    if (gone(ranks[static_cast<std::size_t>(position)]).ok()) next = position;
  }
  if (next < 0) return;
  // A process that runs another program has not ended, and its connections within the host have no
  // descriptors that would.
  if (!region_->keeps_memory(next)) {
    const int peer = ranks[static_cast<std::size_t>(next)];
    return on_death(
        peer,
        Status(
            Code::peer_failed,
            rank_text(peer) +
                " has lost its memory: its process has ended, or runs another program now (exec)",
            {peer}));
  }
  const std::uint64_t value = region_->mailbox(next).heartbeat.load(std::memory_order_relaxed);
  if (next != watched_local_ || value != watched_value_ || !judge || value == 0) {
    watched_local_ = next;
    watched_value_ = value;
    watched_since_ = now;
    return;
  }
  const Duration silence = now - watched_since_;
  if (silence <= options_.heartbeat_limit - interval_) return;
  const int peer = ranks[static_cast<std::size_t>(next)];
  if (const Word said = word_of(peer); said == Word::left || said == Word::left_unclosed)
    return suspect_left(peer);
  declare_dead_locked(peer, Status(Code::peer_failed,
                                   rank_text(peer) + " has not answered for " +
                                       muster::describe(silence) + ": it is stopped or hung",
                                   {peer}));
}

}  // namespace muster::transport
