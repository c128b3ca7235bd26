#include "core/transport/link/links.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace muster::transport {
namespace {

constexpr Duration kShortestConnect = std::chrono::seconds(10);  // limit: patience

}  // namespace

Links::Links(EngineContext& engine, Link::MakeEvents make_events)
    : engine_(engine),
      make_events_(std::move(make_events)),
      links_(static_cast<std::size_t>(engine.world_size())),
      poller(engine, links_),
      writer(engine, poller) {}

Link& Links::at(int rank) {
  auto& link = links_[static_cast<std::size_t>(rank)];
  if (!link) link = std::make_unique<Link>(rank, engine_, make_events_);
  return *link;
}

Link& Links::to(int rank) {
  Link& link = at(rank);
  if (link.up_or_connecting() || !link.ended.ok() || !engine_.ranks.gone(rank).ok()) return link;
  link.flags.connecting = true;
  engine_.failures->on_stream_begin(link);
  const FabricOptions& options = engine_.options;
  Duration limit = std::max(kShortestConnect, options.heartbeat_limit);
  if (options.timeout >= Duration::zero())
    limit = std::min(limit, std::max<Duration>(options.timeout, Duration(1)));
  engine_.connector.connect(rank, deadline_after(*options.clock, limit));
  engine_.pass.connector_timer = TimePoint::min();
  engine_.pass.schedule(engine_.now());
  return link;
}

bool Links::attach(int peer, std::unique_ptr<ByteStream> stream) {
  Link& link = at(peer);
  const bool asked = std::exchange(link.flags.connecting, false);
  if (link.up() || !engine_.ranks.gone(peer).ok()) return false;
  engine_.ranks.forget_unneeded_death(peer);
  if (!asked) engine_.failures->on_stream_begin(link);
  link.stream = std::move(stream);
  link.ended = Status();
  link.times.heard = engine_.now();
  link.times.asked = TimePoint{};
  poller.add(link);
  writer.mark_dirty(link);
  engine_.pass.completed = true;
  return true;
}

void Links::close(Link& link) {
  if (!link.up()) return;
  poller.remove(link);
  link.stream.reset();
  link.flags.stuck = false;
  link.flags.polled_for_room = false;
}

}  // namespace muster::transport
