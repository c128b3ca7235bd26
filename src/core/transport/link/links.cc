// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/link/links.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/transport/link/send_batch.h"
#include "core/tunables/tunables.h"

namespace muster::transport {

Status LinkPoller::open() {
  ready_ = std::make_unique<ReadySet>();
  if (Status status = ready_->open(); !status) return status;
  if (engine_.connector.descriptor() >= 0)
    ready_->add(engine_.connector.descriptor(), ReadySet::kConnector);
  return {};
}

void LinkPoller::add(Link& link) {
  if (!link.has_descriptor() || !ready_) return plain_.push_back(&link);
  end_aside();
  if (link.stream->holds_more()) holding_.push_back(&link);
  watch(link) ? with_descriptor_.push_back(&link) : plain_.push_back(&link);
}

/// False where the system watches no more descriptors (fs.epoll.max_user_watches): the link is then
/// read in every pass.
bool LinkPoller::watch(const Link& link) {
  return ready_->add(link.stream->descriptor(), link.peer());
}

void LinkPoller::remove(Link& link) {
  if (std::erase(with_descriptor_, &link) > 0) {
    ready_->remove(link.stream->descriptor());
  } else {
    // Removed after the pass.
    std::replace(plain_.begin(), plain_.end(), &link, static_cast<Link*>(nullptr));
  }
}

void LinkPoller::poll_for_room(Link& link, bool on) {
  if (!ready_ || !link.has_descriptor() || on == link.flags.polled_for_room) return;
  end_aside();
  // Fails for a link that is not in the set; the watcher then tries to write from time to time.
  if (ready_->want_writable(link.stream->descriptor(), link.peer(), on))
    link.flags.polled_for_room = on;
}

bool LinkPoller::read(Link& link) {
  if (!link.up() || link.flags.in_service) return false;
  link.flags.in_service = true;
  const bool moved = link.read_some();
  link.flags.in_service = false;
  if (!link.ended.ok()) engine_.failures->on_stream_end(link, link.ended);
  return moved;
}

bool LinkPoller::read_holding() {
  bool moved = false;
  for (Link* link : std::exchange(holding_, {})) moved |= read(*link);
  return moved;
}

bool LinkPoller::poll_few() {
  std::array<Link*, fixed::kPlainLinks> few{};  // a link that ends takes itself out of the list
  std::copy(with_descriptor_.begin(), with_descriptor_.end(), few.begin());
  bool moved = false;
  for (Link* link : few) moved |= link != nullptr && read(*link);
  return moved;
}

bool LinkPoller::poll_plain() {
  bool moved = false;
  for (std::size_t i = 0; i < plain_.size(); ++i) {
    if (plain_[i] != nullptr) moved |= read(*plain_[i]);
  }
  std::erase(plain_, nullptr);
  return moved;
}

void LinkPoller::poll_plain(Link* link) {
  if (link == nullptr || std::find(plain_.begin(), plain_.end(), link) == plain_.end()) return;
  read(*link);
  std::erase(plain_, nullptr);
}

/// Takes the few descriptors that are read in every pass out of the epoll set. Otherwise every
/// message wakes the set, and the set the watcher, at the cost of the sender.
void LinkPoller::set_aside() {
  const auto waits_for_room = [](const Link* link) { return link->flags.polled_for_room; };
  if (aside_ || std::any_of(with_descriptor_.begin(), with_descriptor_.end(), waits_for_room))
    return;
  for (const Link* link : with_descriptor_) ready_->remove(link->stream->descriptor());
  aside_ = true;
}

void LinkPoller::end_aside() {
  if (!std::exchange(aside_, false)) return;
  std::erase_if(with_descriptor_, [this](Link* link) {
    if (watch(*link)) return false;
    plain_.push_back(link);
    return true;
  });
}

void LinkWriter::mark_dirty(Link& link) {
  if (link.flags.dirty) return;
  link.flags.dirty = true;
  dirty_.push_back(&link);
}

void LinkWriter::push_control(Link& link, const FrameHeader& header, std::string record) {
  link.protocol.out.push_control(header, std::move(record));
  mark_dirty(link);
}

std::size_t LinkWriter::batch(Link& link, const FrameHeader& header, ConstBytes payload) {
  if (payload.size() > fixed::kSmallMessage || !link.up() || link.flags.dirty ||
      link.flags.in_service || !link.write_failure.ok())
    return 0;
  SendBatch* const batch = SendBatch::of(*engine_.fabric);
  if (batch == nullptr) return 0;
  batch->note();
  if (!std::exchange(link.flags.batched, true)) batched_.push_back(&link);
  if (link.protocol.out.gather_message(header, payload) >= fixed::kGatheredWrite) mark_dirty(link);
  return sizeof header + payload.size();
}

void LinkWriter::release_batches() {
  for (Link* const link : batched_) {
    link->flags.batched = false;
    if (link->protocol.out.has_output()) mark_dirty(*link);
  }
  batched_.clear();
}

void LinkWriter::flush() {
  for (std::size_t i = 0; i < dirty_.size();) {
    Link& link = *dirty_[i];
    if (link.up() && link.has_output() && !link.flags.in_service) link.write_some();
    if (!link.write_failure.ok() && link.up()) {
      // The reason for the peer's end may still be unread.
      poller_.read(link);
      if (link.up()) engine_.failures->on_stream_end(link, link.write_failure);
    }
    poller_.poll_for_room(link, link.flags.stuck && link.has_output());
    if (link.up() && link.has_output()) {
      ++i;
      continue;
    }
    link.flags.dirty = false;  // a new stream marks it again
    dirty_[i] = dirty_.back();
    dirty_.pop_back();
  }
}

bool LinkWriter::could_write_more() const {
  return std::any_of(dirty_.begin(), dirty_.end(), [](const Link* link) {
    return link->up() && !link->flags.stuck && !link->flags.in_service && link->has_output();
  });
}

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
