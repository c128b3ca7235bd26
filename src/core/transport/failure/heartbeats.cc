// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/failure/heartbeats.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log/log.h"
#include "core/transport/engine/engine_context.h"

namespace muster::transport {
namespace {

/// The kernel is asked for the state of a silent process from so many beats before its silence is a
/// suspicion.
constexpr int kLooksBefore = 4;  // limit: looks at which it must be stopped

}  // namespace

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
  last_ = now;
  next_ = now + interval;
  detector_.forget_old_cause(now);
  // Every rank is monitored by a link from the rank before it in the ring, unless a rank of its own
  // host monitors it.
  if (const int next = watched_neighbour(1); next >= 0) links_.to(next);
  beat_links(now, late);
  beat_mailboxes(now, late);
}

void Heartbeats::tell(int rank, TimePoint since, Silence::Step step) const {
  if (engine_.options.on_silence) engine_.options.on_silence({rank, since, step});
}

void Heartbeats::suspect(int rank, PeerSilence& known, TimePoint since) {
  if (std::exchange(known.suspected, true)) return;
  const auto what_follows = [&]() -> std::string {
    switch (engine_.connector.process_state(rank)) {
      case ProcessState::running:
        return ": its process runs, so it probably waits for a core; it is waited for";
      case ProcessState::stopped:
        return ": its process is stopped (SIGSTOP, or a debugger); it counts as failed unless it "
               "goes on at once";
      default: break;
    }
    const std::string why = ": it is stopped, starved or unreachable; ";
    if (!engine_.has_silence_limit()) return why + "it is waited for, as heartbeat_timeout is 0";
    return why + "it counts as failed after " + muster::describe(engine_.options.heartbeat_limit);
  };
  log(LogLevel::warning, rank_text(rank) + " has not answered for " +
                             muster::describe(engine_.now() - since) + what_follows());
  tell(rank, since, Silence::Step::suspected);
}

void Heartbeats::unsuspect(int rank, PeerSilence& known, TimePoint since) {
  if (std::exchange(known, {}).suspected) {
    log(LogLevel::info, rank_text(rank) + " answers again");
    tell(rank, since, Silence::Step::over);
  }
}

/// Whether `rank`, which has been silent for longer than the suspicion limit or soon will be, has
/// failed. `judge`: its silence counts.
bool Heartbeats::has_failed(int rank, PeerSilence& known, Duration silence, bool judge) {
  // A tracer stops a process for an instant at a time, so one look is not enough.
  constexpr int kStops = 3;
  const ProcessState state = engine_.connector.process_state(rank);
  known.stops = state == ProcessState::stopped ? known.stops + 1 : 0;
  const Duration interval = engine_.heartbeat_interval();
  if (state != ProcessState::unknown)
    return known.stops >= kStops && silence > engine_.suspicion_limit() - interval;
  return judge && engine_.has_silence_limit() &&
         silence > engine_.options.heartbeat_limit - interval;
}

void Heartbeats::declare(int rank, const PeerSilence& known, TimePoint since, TimePoint now) {
  tell(rank, since, Silence::Step::verdict);
  detector_.declare_dead(
      rank, Status(Code::peer_failed,
                   rank_text(rank) + " has not answered for " + muster::describe(now - since) +
                       (known.stops > 0 ? ": its process is stopped (SIGSTOP, or a debugger)"
                                        : ": it is stopped, hung or unreachable"),
                   {rank}));
}

/// `late`: as in `beat_mailboxes`.
void Heartbeats::beat_links(TimePoint now, bool late) {
  const Duration interval = engine_.heartbeat_interval();
  const int next = neighbour(1);
  const int previous = neighbour(-1);
  std::vector<Link*> failed;
  for (const auto& link : links_.all()) {
    if (!link || !link->up() || engine_.in_region(link->peer())) continue;
    const int peer = link->peer();
    LinkTimes& times = link->times;
    const bool matters =
        peer == next || peer == previous || link->busy() || engine_.ranks.posted_from(peer) > 0;
    const bool asked = times.asked != TimePoint{};
    const bool judge = suspended_ == 0 && !(late && asked && link->silence.pauses.excuse());
    if (asked && (link->ping_is_moving() || !judge)) times.asked = now;
    if (!asked) unsuspect(peer, link->silence, times.heard);
    if (!matters || now - times.heard < interval) continue;
    if (times.asked == TimePoint{}) {
      times.asked = now;
      link->ping = {};
    }
    const Duration silence = now - times.asked;
    if (suspended_ == 0 && silence > engine_.suspicion_limit() - kLooksBefore * interval &&
        has_failed(peer, link->silence, silence, judge)) {
      failed.push_back(link.get());
      continue;
    }
    if (judge && silence > engine_.suspicion_limit() - interval)
      suspect(peer, link->silence, times.heard);
    if (!link->protocol.out.queued(FrameKind::ping)) {
      FrameHeader ping;
      ping.kind = FrameKind::ping;
      links_.writer.push_control(*link, ping);
    }
  }
  for (Link* const link : failed) declare(link->peer(), link->silence, link->times.heard, now);
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

/// `late`: this rank itself had no core since its last beat. Then others of the host may have been
/// stopped with it, and have the whole limit from now on.
void Heartbeats::beat_mailboxes(TimePoint now, bool late) {
  engine_.mailbox().heartbeat.fetch_add(1, std::memory_order_relaxed);
  if (engine_.region == nullptr) return;
  const int next = next_in_region();
  if (next < 0) return;
  const int peer = engine_.region->ranks()[static_cast<std::size_t>(next)];
  // A process replaced by exec has not ended, and connections within the host have no descriptors
  // that exec would close.
  if (!engine_.region->keeps_memory(next)) {
    const std::string end = engine_.connector.end_of_process(peer);
    return detector_.on_death(
        peer, Status(Code::peer_failed,
                     rank_text(peer) + " " +
                         (end.empty() ? "runs another program now (exec), or is about to end"
                                      : end + ": its process is gone"),
                     {peer}));
  }
  const std::uint64_t value =
      engine_.region->mailbox(next).heartbeat.load(std::memory_order_relaxed);
  if (next != watched_.position || value != watched_.value || value == 0) {
    if (next == watched_.position) unsuspect(peer, watched_.silence, watched_.since);
    watched_ = {next, value, now, {}, {}};
    return;
  }
  if (suspended_ > 0) {
    watched_.since = now;
    return;
  }
  if (late && watched_.pauses.excuse()) {
    watched_.since = now;
    watched_.silence.stops = 0;
    return;
  }
  const Duration silence = now - watched_.since;
  const Duration interval = engine_.heartbeat_interval();
  if (silence <= engine_.suspicion_limit() - kLooksBefore * interval) return;
  if (has_left(peer_state_of(engine_, peer))) return detector_.suspect_left(peer);
  // A look that is late and is not excused any more counts.
  if (has_failed(peer, watched_.silence, silence, /*judge=*/true))
    return declare(peer, watched_.silence, watched_.since, now);
  if (silence > engine_.suspicion_limit() - interval)
    suspect(peer, watched_.silence, watched_.since);
}

}  // namespace muster::transport
