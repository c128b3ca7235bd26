// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "core/transport/link/frame_router.h"

namespace muster::transport {
namespace {

constexpr Duration kCloseLimit = std::chrono::seconds(1);  // limit: patience

}  // namespace

Engine::Engine(const FabricOptions& options, std::unique_ptr<Connector> connector)
    : connector_(std::move(connector)),
      context_(options, *connector_),
      links_(context_,
             [this](Link& link) {
               return std::make_unique<FrameRouter>(link, context_, links_.writer, channels_,
                                                    detector_);
             }),
      loop_(context_, links_, *this),
      wait_(context_, loop_),
      channels_(context_, links_, loop_),
      detector_(context_, links_, channels_),
      heartbeats_(context_, links_, detector_) {
  context_.failures = &detector_;
}

Engine::~Engine() {
  watcher_.reset();
  channels_.clear();
}

// ---- life

Status Engine::meet(const Exchange& exchange) {
  const std::size_t size = static_cast<std::size_t>(context_.world_size());
  const TimePoint deadline = std::min(
      deadline_after(*context_.options.clock, context_.options.timeout), context_.options.deadline);
  Result<std::string> contact = connector_->own_address(deadline);
  if (!contact) return contact.status();
  auto contacts = exchange("contacts", *contact);
  if (contacts.status().code() == Code::mismatch) return contacts.status();
  if (!contacts) return contacts.status().with_context("while exchanging the ranks' addresses");
  if (contacts->size() != size)
    return Status(Code::internal, "the exchange of addresses answered for another number of ranks");
  Result<std::string> verdict = connector_->meet(*contacts, deadline);
  if (!verdict) return verdict.status();
  auto verdicts = exchange("verdicts", *verdict);
  if (!verdicts) return verdicts.status().with_context("while agreeing which ranks share a host");
  if (verdicts->size() != size)
    return Status(Code::internal, "the exchange of verdicts answered for another number of ranks");
  if (Status status = connector_->settle(*verdicts, *this); !status) return status;
  // No rank may continue, and perhaps end, before all can be reached. A rank that has mapped the
  // region of all ranks is reachable: messages in the region remain readable after their writer has
  // ended.
  shm::HostRegion* const region = connector_->region();
  const bool all_in_region = region != nullptr && region->ranks().size() == size;
  if (size > 1 && !all_in_region) {
    if (auto all = exchange("settled", ""); !all)
      return all.status().with_context("while waiting until all ranks can be reached");
  }

  context_.hosts = connector_->hosts();
  context_.region = region;
  context_.region_position.assign(size, -1);
  if (region != nullptr) {
    int position = 0;
    for (const int rank : region->ranks())
      context_.region_position[static_cast<std::size_t>(rank)] = position++;
  }
  const int host = context_.hosts[static_cast<std::size_t>(context_.rank())];
  const auto locals = std::count(context_.hosts.begin(), context_.hosts.end(), host);
  context_.topology = Topology(static_cast<std::size_t>(locals), connector_->cores());
  return {};
}

Status Engine::start(Fabric& fabric) {
  context_.fabric = &fabric;
  channels_.start();
  heartbeats_.start(context_.now());
  if (!context_.options.threads) return {};
  if (Status status = links_.poller.open(); !status) return status;
  if (Status status = loop_.open_watcher_signal(); !status) return status;
  watcher_ = std::make_unique<Watcher>(loop_, loop_.watcher_signal());
  return watcher_->start(context_.rank());
}

void Engine::shut_down() {
  if (context_.forked()) return;  // the links are our parent's
  if (has_left_.exchange(true)) return;
  bool failed = false, unclosed = false;
  {
    const PassLoop::LoopEntry entry(loop_);
    context_.own.closing = true;
    failed = context_.own.failed;
    unclosed = context_.own.unclosed;
    channels_.fail_all(Status(
        Code::aborted, rank_text(context_.rank()) + " has closed its connections to the job"));
    if (!failed) close_links();
  }
  if (!failed) flush_at_the_end();
  if (watcher_) watcher_->stop();
  // Done last: readers of the region expect nothing more from this rank afterwards.
  if (!failed)
    context_.mailbox().aborted.store(unclosed ? shm::Mailbox::kUnclosed : shm::Mailbox::kLeft,
                                     std::memory_order_release);
  const PassLoop::LoopEntry entry(loop_);
  for (const auto& link : links_.all()) {
    if (link) links_.close(*link);
  }
}

void Engine::leave_unclosed(const std::string& after) {
  if (context_.forked()) return;
  const PassLoop::LoopEntry entry(loop_);
  context_.own.unclosed = true;
  if (!after.empty()) context_.own.trouble = after;
}

void Engine::fail_rank(const std::string& why, const std::vector<int>& earlier) {
  if (context_.forked()) return;
  {
    const PassLoop::LoopEntry entry(loop_);
    if (context_.own.closing) return;
    detector_.fail_this_rank(why, earlier);
    // From here on this rank declares no peer dead: peers drop their links as soon as they receive
    // the close.
    context_.own.closing = context_.own.failed = true;
  }
  flush_at_the_end();
}

void Engine::push_close(Link& link) {
  FrameHeader header;
  header.kind = FrameKind::close;
  header.amount = context_.own.unclosed ? 1 : 0;
  links_.writer.push_control(link, header);
}

void Engine::close_links() {
  // Neighbours on other hosts monitor this rank, so they need a close frame too.
  for (const int step : {1, -1}) {
    if (const int neighbour = heartbeats_.watched_neighbour(step); neighbour >= 0)
      links_.to(neighbour);
  }
  if (!context_.own.trouble.empty()) detector_.tell_trouble(context_.own.trouble);
  for (const auto& link : links_.all()) {
    if (link && context_.ranks.gone(link->peer()).ok()) push_close(*link);
  }
}

void Engine::flush_at_the_end() {
  const FabricOptions& options = context_.options;
  if (options.threads || (options.idle && std::uncaught_exceptions() == 0)) {
    wait_.wait([this] { return everything_said(); }, deadline_after(*options.clock, kCloseLimit));
  } else {
    loop_.poll(true);
  }
}

/// Waits until all is written and, on sockets, acknowledged: closing a socket with unread input
/// would reset it and discard bytes in flight.
bool Engine::everything_said() {
  const PassLoop::LoopEntry entry(loop_);
  const auto links = links_.all();
  return std::none_of(links.begin(), links.end(), [this](const auto& link) {
    if (!link || !context_.ranks.gone(link->peer()).ok()) return false;
    if (!link->up()) return link->flags.connecting;
    return link->has_output() ||
           (link->has_descriptor() && !link->close.acknowledged && !link->close.received);
  });
}

// ---- what the fabric asks for

Result<std::shared_ptr<Channel>> Engine::open(std::shared_ptr<Engine> self, std::uint32_t id,
                                              std::vector<int> members) {
  if (context_.forked())
    return Status(Code::aborted, "a forked child cannot make groups on its parent's connections");
  const PassLoop::LoopEntry entry(loop_);
  // The channel failed before it was opened; only now are the members known that must be told.
  const ChannelState* const early = channels_.find(id);
  const Status known = early != nullptr ? early->failure() : Status();
  auto channel = channels_.open(id, std::move(members));
  if (!channel) return channel.status();
  if (!known.ok()) detector_.spread_channel_failure(**channel, known);
  return std::shared_ptr<Channel>(channel->get(), [self = std::move(self), held = *channel](
                                                      Channel*) { self->retire(held->id()); });
}

void Engine::retire(std::uint32_t id) {
  if (context_.forked()) return;
  const PassLoop::LoopEntry entry(loop_);
  channels_.retire(id);
}

std::uint32_t Engine::next_channel_id() {
  const PassLoop::LoopEntry entry(loop_);
  return channels_.next_id();
}

Status Engine::death_of(int rank) {
  if (rank < 0 || rank >= context_.world_size()) return {};
  const PassLoop::LoopEntry entry(loop_);
  return context_.ranks.death(rank);
}

Status Engine::why_gone(int rank) {
  if (rank < 0 || rank >= context_.world_size()) return {};
  const PassLoop::LoopEntry entry(loop_);
  return context_.ranks.gone(rank);
}

void Engine::declare_dead(int rank, const Status& evidence) {
  if (rank < 0 || rank >= context_.world_size() || rank == context_.rank() || evidence.ok()) return;
  const PassLoop::LoopEntry entry(loop_);
  detector_.declare_dead(rank, evidence);
}

void Engine::suspend_heartbeats(bool on) {
  const PassLoop::LoopEntry entry(loop_);
  heartbeats_.suspend(on);
}

void Engine::write_batches() {
  if (context_.forked()) return;
  const PassLoop::LoopEntry entry(loop_);
  links_.writer.release_batches();
}

Traffic Engine::traffic() {
  const PassLoop::LoopEntry entry(loop_);
  return context_.pass.traffic;
}

std::map<int, LinkFigures> Engine::link_figures() {
  std::map<int, LinkFigures> figures;
  if (context_.forked()) return figures;
  const PassLoop::LoopEntry entry(loop_);
  for (const auto& link : links_.all()) {
    if (!link || !link->up()) continue;
    if (const auto found = link->stream->figures()) figures.emplace(link->peer(), *found);
  }
  return figures;
}

// ---- what lower parts report

void Engine::on_stream(int peer, std::unique_ptr<ByteStream> stream) {
  if (!links_.attach(peer, std::move(stream))) return;
  if (context_.own.closing && !context_.own.failed) push_close(*links_.find(peer));
}

void Engine::on_due(TimePoint now) {
  context_.pass.next_duty = TimePoint::max();
  detector_.judge_suspects(now);
  if (context_.world_size() == 1 || context_.own.closing) return;
  context_.pass.schedule(heartbeats_.run(now));
}

}  // namespace muster::transport
