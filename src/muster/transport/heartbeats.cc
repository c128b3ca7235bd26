#include "muster/transport/heartbeats.h"

#include <chrono>
#include <string>
#include <vector>

#include "muster/transport/peer_state.h"

namespace muster::transport {

/// The nearest rank in the ring of all ranks that is still there; -1 if there is none.
int Heartbeats::neighbour(int step) const {
  const int size = engine_.world_size(), me = engine_.rank();
  for (int at = (me + step + size) % size; at != me; at = (at + step + size) % size) {
    if (engine_.ranks.gone(at).ok()) return at;
  }
  return -1;
}

int Heartbeats::watched_neighbour(int step) const {
  const int nearest = neighbour(step);
  return nearest >= 0 && !engine_.in_region(nearest) ? nearest : -1;
}

TimePoint Heartbeats::run(TimePoint now) {
  if (now >= next_) beat(now);
  return next_;
}

void Heartbeats::beat(TimePoint now) {
  const Duration interval = engine_.heartbeat_interval();
  // If this rank itself was delayed, silence in the meantime proves nothing about the others.
  const bool late = now - last_ > 3 * interval;
  const bool judge = engine_.has_heartbeats() && suspended_ == 0 && !late;
  last_ = now;
  next_ = now + (engine_.has_heartbeats() ? interval : Duration(std::chrono::seconds(1)));
  detector_.forget_old_cause(now);
  // Every rank is monitored by a link from the rank before it in the ring, unless a rank of its own
  // host monitors it.
  if (const int next = watched_neighbour(1); next >= 0) links_.to(next);
  beat_links(now, judge);
  beat_mailboxes(now, judge);
}

Status Heartbeats::silence_of(int rank, Duration silence, const char* guess) const {
  return Status(
      Code::peer_failed,
      rank_text(rank) + " has not answered for " + muster::describe(silence) + ": it is " + guess,
      {rank});
}

void Heartbeats::beat_links(TimePoint now, bool judge) {
  const Duration interval = engine_.heartbeat_interval();
  const int next = neighbour(1);
  const int previous = neighbour(-1);
  std::vector<int> silent;
  for (const auto& link : links_.all()) {
    if (!link || !link->up() || engine_.in_region(link->peer())) continue;
    const int peer = link->peer();
    LinkTimes& times = link->times;
    const bool matters =
        peer == next || peer == previous || link->busy() || engine_.ranks.posted_from(peer) > 0;
    if (!judge && times.asked != TimePoint{}) times.asked = now;
    if (!matters || now - times.heard < interval) continue;
    if (times.asked == TimePoint{}) {
      times.asked = now;
    } else if (judge && now - times.asked > engine_.options.heartbeat_limit - interval) {
      silent.push_back(peer);
      continue;
    }
    if (!link->protocol.out.queued(FrameKind::ping)) {
      FrameHeader ping;
      ping.kind = FrameKind::ping;
      links_.writer.push_control(*link, ping);
    }
  }
  for (const int peer : silent) {
    const Duration silence = now - links_.find(peer)->times.heard;
    detector_.declare_dead(peer, silence_of(peer, silence, "stopped, hung or unreachable"));
  }
}

/// Position of the next rank of the region that is still there; -1 if there is none.
int Heartbeats::next_in_region() const {
  const auto ranks = engine_.region->ranks();
  const auto size = static_cast<int>(ranks.size());
  for (int step = 1; step < size; ++step) {
    const int position = (engine_.region->local_rank() + step) % size;
    if (engine_.ranks.gone(ranks[static_cast<std::size_t>(position)]).ok()) return position;
  }
  return -1;
}

void Heartbeats::beat_mailboxes(TimePoint now, bool judge) {
  engine_.mailbox().heartbeat.fetch_add(1, std::memory_order_relaxed);
  if (engine_.region == nullptr) return;
  const int next = next_in_region();
  if (next < 0) return;
  const int peer = engine_.region->ranks()[static_cast<std::size_t>(next)];
  // A process replaced by exec has not ended, and connections within the host have no descriptors
  // that exec would close.
  if (!engine_.region->keeps_memory(next)) {
    return detector_.on_death(
        peer,
        Status(
            Code::peer_failed,
            rank_text(peer) +
                " has lost its memory: its process has ended, or runs another program now (exec)",
            {peer}));
  }
  const std::uint64_t value =
      engine_.region->mailbox(next).heartbeat.load(std::memory_order_relaxed);
  if (next != watched_.position || value != watched_.value || !judge || value == 0) {
    watched_ = {next, value, now};
    return;
  }
  const Duration silence = now - watched_.since;
  if (silence <= engine_.options.heartbeat_limit - engine_.heartbeat_interval()) return;
  if (has_left(peer_state_of(engine_, peer))) return detector_.suspect_left(peer);
  detector_.declare_dead(peer, silence_of(peer, silence, "stopped or hung"));
}

}  // namespace muster::transport
