#include "muster/transport/engine.h"

#include <algorithm>
#include <array>
#include <exception>

#include "muster/transport/core_sharing.h"
#include "muster/transport/watcher.h"

namespace muster::transport {
namespace {

// Channels that frames may name before they are opened here: far more than honest peers are ahead
// of us.
constexpr std::size_t kMaxUnopened = 4096;
// Passes of a spinning poller between two looks at all descriptors, where few links have one.
constexpr std::uint64_t kPlainPasses = 64;
// So few are read in every pass without being asked first whether there is anything: one system
// call less for each message.
constexpr std::size_t kFew = 2;
// What is copied to travel with others, and how much of it makes a write.
constexpr std::size_t kGatheredMessage = 4 * 1024;
constexpr std::size_t kGatheredWrite = 32 * 1024;
constexpr Duration kGoodbyeLimit = std::chrono::seconds(1);
constexpr Duration kShortestConnect = std::chrono::seconds(10);

}  // namespace

Engine::Engine(const FabricOptions& options, std::unique_ptr<Connector> connector)
    : options_(options),
      connector_(std::move(connector)),
      links_(static_cast<std::size_t>(options.world_size)),
      gone_(static_cast<std::size_t>(options.world_size)),
      deaths_(static_cast<std::size_t>(options.world_size)),
      posted_from_(static_cast<std::size_t>(options.world_size)) {}

Engine::~Engine() {
  watcher_.reset();
  channels_.clear();
  bootstrap_.reset();
  agreements_.reset();
}

// ---- life
// ----------------------------------------------------------------------------------------------------------

Status Engine::meet(const Exchange& exchange) {
  const TimePoint deadline = std::min(deadline_after(clock(), options_.timeout), options_.deadline);
  Result<std::string> contact = connector_->contact(deadline);
  if (!contact) return contact.status();
  auto contacts = exchange("contacts", *contact);
  if (contacts.status().code() == Code::mismatch) return contacts.status();
  if (!contacts) return contacts.status().with_context("while exchanging the ranks' addresses");
  if (contacts->size() != links_.size())
    return Status(Code::internal, "the exchange of addresses answered for another number of ranks");
  Result<std::string> verdict = connector_->meet(*contacts, deadline);
  if (!verdict) return verdict.status();
  auto verdicts = exchange("verdicts", *verdict);
  if (!verdicts) return verdicts.status().with_context("while agreeing which ranks share a host");
  if (verdicts->size() != links_.size())
    return Status(Code::internal, "the exchange of verdicts answered for another number of ranks");
  if (Status status = connector_->settle(*verdicts, *this); !status) return status;
  // Nobody goes on, and perhaps ends, before all can be reached. Who has mapped the region of all
  // ranks can be: what stands there counts also when its writer has ended.
  const bool all_in_region =
      connector_->region() != nullptr && connector_->region()->ranks().size() == links_.size();
  if (world_size() > 1 && !all_in_region) {
    if (auto all = exchange("settled", ""); !all)
      return all.status().with_context("while waiting until all ranks can be reached");
  }

  hosts_ = connector_->hosts();
  region_ = connector_->region();
  local_position_.assign(links_.size(), -1);
  if (region_ != nullptr) {
    int position = 0;
    for (const int rank : region_->ranks())
      local_position_[static_cast<std::size_t>(rank)] = position++;
  }
  const auto locals =
      std::count(hosts_.begin(), hosts_.end(), hosts_[static_cast<std::size_t>(rank())]);
  ranks_per_core_ = ranks_per_core(static_cast<std::size_t>(locals), connector_->cores());
  may_spin_ = ranks_per_core_ == 1;
  return {};
}

Status Engine::start(Fabric& fabric) {
  fabric_ = &fabric;
  std::vector<int> everybody(links_.size());
  for (std::size_t r = 0; r < everybody.size(); ++r) everybody[r] = static_cast<int>(r);
  bootstrap_ = std::make_shared<ChannelState>(*this, 0);
  bootstrap_->open_locked(everybody);
  channels_[0] = bootstrap_;
  agreements_ = std::make_shared<ChannelState>(*this, kAgreements);
  agreements_->open_locked(std::move(everybody));
  channels_[kAgreements] = agreements_;
  used_ids_[0] = 0;
  interval_ = std::max<Duration>(options_.heartbeat_limit / 10, std::chrono::milliseconds(1));
  next_beat_ = last_beat_ = clock().now();
  if (!options_.threads) return {};
  ready_ = std::make_unique<ReadySet>();
  if (Status status = ready_->open(); !status) return status;
  if (connector_->descriptor() >= 0) ready_->add(connector_->descriptor(), ReadySet::kConnector);
  watcher_ = std::make_unique<Watcher>(*this);
  return watcher_->start(ready_->descriptor());
}

void Engine::shut_down() {
  if (mark_.forked()) return;  // the links are our parent's
  bool failed = false, unclosed = false;
  {
    Entry entry(*this);
    closing_ = true;
    failed = own_failure_;
    unclosed = unclosed_;
    const Status over(Code::aborted,
                      "rank " + std::to_string(rank()) + " has closed its connections to the job");
    for (auto& [id, channel] : channels_) channel->fail_locked(over);
    if (!failed) say_goodbye();
  }
  if (!failed) flush_at_the_end();
  if (watcher_) watcher_->stop();
  // Only now: who reads it looks for nothing more from us.
  if (!failed)
    connector_->mailbox().aborted.store(unclosed ? shm::Mailbox::kUnclosed : shm::Mailbox::kLeft,
                                        std::memory_order_release);
  lock_.lock();
  for (auto& link : links_) {
    if (link && link->up()) close_stream(*link);
  }
  lock_.unlock();
}

void Engine::flush_at_the_end() {
  if (options_.threads || (options_.idle && std::uncaught_exceptions() == 0)) {
    wait([this] { return quiet(); }, deadline_after(clock(), kGoodbyeLimit));
  } else {
    poll(true);
  }
}

void Engine::leave_unclosed() {
  if (forked()) return;
  Entry entry(*this);
  unclosed_ = true;
}

void Engine::fail_rank(const std::string& why, const std::vector<int>& earlier) {
  if (forked()) return;
  {
    Entry entry(*this);
    if (closing_) return;
    const Status cause = own_failure(why, earlier);
    for (auto& [id, channel] : channels_) channel->fail_locked(cause);
    note_cause(cause);
    FrameHeader header;
    header.kind = FrameKind::rank_failure;
    header.message = static_cast<std::uint64_t>(rank());
    header.amount = 1;
    spread(bootstrap_->members(), header, encode_cause(cause), -1);
    // From here on this rank judges nobody: peers drop their links as soon as they hear of it.
    closing_ = own_failure_ = true;
  }
  flush_at_the_end();
}

void Engine::say_goodbye() {
  if (world_size() > 1 && interval_ > Duration::zero()) {
    // Whoever watches us from another host must hear it too.
    for (const int step : {1, -1}) {
      const int neighbour = ring_neighbour(step);
      if (neighbour >= 0 && !in_region(neighbour)) link_to(neighbour);
    }
  }
  FrameHeader header;
  header.kind = FrameKind::goodbye;
  header.amount = unclosed_ ? 1 : 0;
  for (auto& link : links_) {
    if (!link || !gone(link->peer()).ok()) continue;
    link->protocol.push_control(header);
    mark_dirty(*link);
  }
}

/// Whether everything has been said: written, and where unread input could take it back from the
/// wire, answered.
bool Engine::quiet() {
  Entry entry(*this);
  return std::none_of(links_.begin(), links_.end(), [this](const auto& link) {
    if (!link || !gone(link->peer()).ok()) return false;
    if (!link->up()) return link->connecting;
    return link->protocol.has_output() ||
           (link->stream->descriptor() >= 0 && !link->farewell && !link->goodbye);
  });
}

// ---- channels
// ------------------------------------------------------------------------------------------------------

Result<std::shared_ptr<Channel>> Engine::open(std::shared_ptr<Engine> self, std::uint32_t id,
                                              std::vector<int> members) {
  if (forked())
    return Status(Code::aborted, "a forked child cannot make groups on its parent's connections");
  Entry entry(*this);
  std::vector<bool> seen(links_.size());
  for (const int member : members) {
    if (member < 0 || member >= world_size() || seen[static_cast<std::size_t>(member)]) {
      return Status(Code::invalid_argument,
                    "a channel's members must be different ranks of the job; " +
                        std::to_string(member) + " is not, or is there twice");
    }
    seen[static_cast<std::size_t>(member)] = true;
  }
  if (!seen[static_cast<std::size_t>(rank())]) {
    return Status(Code::invalid_argument,
                  "rank " + std::to_string(rank()) +
                      " is not among the members of the channel that it opens");
  }
  if (id == kAgreements)
    return Status(Code::invalid_argument,
                  "channel " + std::to_string(id) + " has been used before");
  auto run = used_ids_.upper_bound(id);
  if (std::prev(run)->second >= id)
    return Status(Code::invalid_argument,
                  "channel " + std::to_string(id) + " has been used before");
  // The runs on both sides grow together where they meet.
  const bool joins_next = run != used_ids_.end() && run->first == id + 1;
  auto previous = std::prev(run);
  std::uint32_t last = joins_next ? run->second : id;
  if (joins_next) used_ids_.erase(run);
  if (previous->second + 1 == id) {
    previous->second = last;
  } else {
    used_ids_[id] = last;
  }

  std::shared_ptr<ChannelState>& channel = channels_[id];
  Status known;  // a failure that came before: until now it was not known whom else it concerns
  if (channel) {
    --unopened_;
    known = channel->failure();
  } else {
    channel = std::make_shared<ChannelState>(*this, id);
  }
  channel->open_locked(std::move(members));
  if (!known.ok()) spread_failure(*channel, known, -1);
  completed_ = true;
  return std::shared_ptr<Channel>(channel.get(), [self = std::move(self), held = channel](
                                                     Channel*) { self->retire(held->id()); });
}

/// The last user has let go of the channel.
void Engine::retire(std::uint32_t id) {
  if (mark_.forked()) return;
  Entry entry(*this);
  const auto found = channels_.find(id);
  if (found == channels_.end()) return;
  found->second->fail_locked(Status(Code::aborted, "the channel was closed"));
  channels_.erase(found);
}

/// Every rank has a range of ids of its own, so that what it gives out nobody else does; in order,
/// so that runs of used ones stay few.
std::uint32_t Engine::next_channel_id() {
  Entry entry(*this);
  const std::uint32_t range = (kAgreements - 1) / static_cast<std::uint32_t>(world_size());
  const std::uint32_t first = 1 + range * static_cast<std::uint32_t>(rank());
  while (given_ids_ < range) {
    const std::uint32_t id = first + given_ids_++;
    if (std::prev(used_ids_.upper_bound(id))->second < id) return id;
  }
  return 0;  // taken, by the channel of all ranks: `open` says so
}

Result<ChannelState*> Engine::channel_for(std::uint32_t id) {
  if (const auto found = channels_.find(id); found != channels_.end()) return found->second.get();
  if (std::prev(used_ids_.upper_bound(id))->second >= id)
    return static_cast<ChannelState*>(nullptr);
  if (unopened_ >= kMaxUnopened)
    return Status(Code::internal, "it has named more channels than may wait to be opened");
  ++unopened_;
  auto& channel = channels_[id];
  channel = std::make_shared<ChannelState>(*this, id);
  return channel.get();
}

// ---- links
// ---------------------------------------------------------------------------------------------------------

Link& Engine::link_to(int rank) {
  auto& link = links_[static_cast<std::size_t>(rank)];
  if (!link) link = std::make_unique<Link>(*this, rank);
  if (!link->up() && !link->connecting && link->ended.ok() && gone(rank).ok()) {
    link->connecting = true;
    tell_old_news(*link);
    Duration patience = std::max<Duration>(kShortestConnect, 4 * options_.heartbeat_limit);
    if (options_.timeout >= Duration::zero())
      patience = std::min(patience, std::max<Duration>(options_.timeout, Duration(1)));
    connector_->connect(rank, deadline_after(clock(), patience));
    connector_timer_ = TimePoint::min();
    schedule(clock().now());
  }
  return *link;
}

void Engine::mark_dirty(Link& link) {
  if (link.dirty) return;
  link.dirty = true;
  dirty_.push_back(&link);
}

std::size_t Engine::gather(Link& link, const FrameHeader& header, ConstBytes payload) {
  if (payload.size() > kGatheredMessage || !link.up() || link.dirty || link.in_service ||
      !link.write_failure.ok())
    return 0;
  Together* const together = Together::of(*fabric_);
  if (together == nullptr) return 0;
  together->note();
  if (!std::exchange(link.holds, true)) holding_.push_back(&link);
  if (link.protocol.gather_message(header, payload) >= kGatheredWrite) mark_dirty(link);
  return sizeof header + payload.size();
}

void Engine::write_gathered() {
  if (forked()) return;
  Entry entry(*this);
  for (Link* const link : holding_) {
    link->holds = false;
    if (link->protocol.has_output()) mark_dirty(*link);
  }
  holding_.clear();
}

Traffic Engine::traffic() {
  Entry entry(*this);
  return traffic_;
}

void Engine::on_stream(int peer, std::unique_ptr<ByteStream> stream) {
  auto& link = links_[static_cast<std::size_t>(peer)];
  if (!link) link = std::make_unique<Link>(*this, peer);
  const bool asked = std::exchange(link->connecting, false);
  if (link->up() || !gone(peer).ok()) return;
  unneeded_deaths_.erase(peer);
  if (!asked) tell_old_news(*link);
  link->stream = std::move(stream);
  link->ended = Status();
  link->heard = clock().now();
  link->asked = TimePoint{};
  if (link->stream->descriptor() >= 0 && ready_) {
    take_back();
    ready_->add(link->stream->descriptor(), peer);
    with_descriptor_.push_back(link.get());
  } else {
    plain_.push_back(link.get());
  }
  if (closing_ && !own_failure_) {
    FrameHeader header;
    header.kind = FrameKind::goodbye;
    header.amount = unclosed_ ? 1 : 0;
    link->protocol.push_control(header);
  }
  mark_dirty(*link);
  completed_ = true;
}

void Engine::close_stream(Link& link) {
  if (!link.up()) return;
  if (link.stream->descriptor() >= 0 && ready_) {
    ready_->remove(link.stream->descriptor());
    std::erase(with_descriptor_, &link);
  } else {
    std::replace(plain_.begin(), plain_.end(), &link,
                 static_cast<Link*>(nullptr));  // swept after the pass
  }
  link.stream.reset();
  link.stuck = false;
  link.interest = 0;
}

bool Engine::service_read(Link& link) {
  if (!link.up() || link.in_service) return false;
  link.in_service = true;
  const bool moved = link.read_some();
  link.in_service = false;
  if (!link.ended.ok()) stream_ended(link, link.ended);
  return moved;
}

void Engine::update_interest(Link& link) {
  const bool want = link.stuck && link.protocol.has_output();
  if (!ready_ || !link.up() || link.stream->descriptor() < 0 || want == (link.interest != 0))
    return;
  take_back();
  link.interest = want ? 1 : 0;
  ready_->want_writable(link.stream->descriptor(), link.peer(), want);
}

/// Takes the few descriptors that are read in every pass out of the set: every message tells the
/// set, and the set the watcher, in the time of its sender. Only while the watcher does not rely on
/// them: it looks by itself then, every millisecond, until it is armed.
void Engine::set_aside() {
  const auto waits_for_room = [](const Link* link) { return link->interest != 0; };
  if (aside_ || !watcher_ || watcher_->armed() ||
      std::any_of(with_descriptor_.begin(), with_descriptor_.end(), waits_for_room))
    return;
  for (const Link* link : with_descriptor_) ready_->remove(link->stream->descriptor());
  aside_ = true;
}

void Engine::take_back() {
  if (!std::exchange(aside_, false)) return;
  for (const Link* link : with_descriptor_) ready_->add(link->stream->descriptor(), link->peer());
}

bool Engine::tell_watcher(std::atomic<bool>& armed) {
  lock_.lock();
  const bool was_armed = armed.exchange(true);
  if (!was_armed) take_back();
  lock_.unlock();
  return !was_armed;
}

void Engine::flush_dirty(TimePoint) {
  for (std::size_t i = 0; i < dirty_.size();) {
    Link& link = *dirty_[i];
    if (link.up() && link.protocol.has_output() && !link.in_service) link.write_some();
    if (!link.write_failure.ok() && link.up()) {
      // Why the peer is gone may still be waiting to be read.
      service_read(link);
      if (link.up()) stream_ended(link, link.write_failure);
    }
    update_interest(link);
    if (link.up() && link.protocol.has_output()) {
      ++i;
      continue;
    }
    link.dirty = false;  // on_stream marks it again
    dirty_[i] = dirty_.back();
    dirty_.pop_back();
  }
}

// ---- passes
// --------------------------------------------------------------------------------------------------------

bool Engine::poll_connector(TimePoint now) {
  const bool moved = connector_->poll(now);
  connector_timer_ = connector_->next_timer();
  return moved;
}

bool Engine::poll_ready() {
  bool moved = false;
  for (const ReadySet::Ready& ready : ready_->poll()) {
    if (ready.token == ReadySet::kConnector) continue;  // asked in every pass anyway
    Link* link = find_link(ready.token);
    if (link == nullptr) continue;
    if (ready.writable) mark_dirty(*link);
    if (ready.readable) service_read(*link);
    moved = true;
  }
  return moved;
}

bool Engine::poll_few() {
  std::array<Link*, kFew> few{};  // a link that ends takes itself out of the list
  std::copy(with_descriptor_.begin(), with_descriptor_.end(), few.begin());
  bool moved = false;
  for (Link* link : few) moved |= link != nullptr && service_read(*link);
  return moved;
}

bool Engine::poll_plain() {
  bool moved = false;
  for (std::size_t i = 0; i < plain_.size(); ++i) {
    if (plain_[i] != nullptr) moved |= read_plain(*plain_[i]);
  }
  std::erase(plain_, nullptr);
  return moved;
}

bool Engine::read_plain(Link& link) {
  if (link.in_service) return false;
  link.in_service = true;
  const bool moved = link.read_some();
  link.in_service = false;
  if (!link.ended.ok()) stream_ended(link, link.ended);
  return moved;
}

/// Looks at everything once. Under the lock.
bool Engine::pass() {
  const TimePoint now = pass_time_ = clock().now();
  taken_since_pass_ = 0;
  bool moved = false;
  moved |= poll_connector(now);  // cheap without news
  if (ready_) {
    const bool few = with_descriptor_.size() <= kFew;
    const bool all = !few || (!aside_ && ++passes_ % kPlainPasses == 0);
    moved |= all ? poll_ready() : poll_few();
    if (all && few && pollers_active()) set_aside();
  }
  moved |= poll_plain();
  flush_dirty(now);
  if (now >= next_duty_) duties(now);
  return moved;
}

Engine::Looked Engine::look(bool in_earnest, TimePoint& now) {
  const bool may = !mark_.forked();
  if (may && in_earnest) {
    lock_.lock();
    passes_ = kPlainPasses - 1;  // look at the descriptors too
  } else if (!may || !lock_.try_lock()) {
    now = clock().now();
    return Looked::busy;
  }
  polls_.store(polls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  const bool moved = pass();
  now = pass_time_;
  leave_entry();
  return moved ? Looked::moved : Looked::idle;
}

void Engine::leave_entry() {
  if (!dirty_.empty()) flush_dirty(TimePoint{});
  const bool wake_sleepers = std::exchange(completed_, false);
  const bool kick = watcher_oversleeps();
  lock_.unlock();
  if (wake_sleepers) connector_->mailbox().wake();
  if (kick) watcher_->kick();
}

TimePoint Engine::watch_pass() {
  lock_.lock();
  // A thread that waits may be busy inside what it waits for: then the watcher looks in its place.
  const bool used = polls() != polls_watched_;
  polls_watched_ = polls();
  const TimePoint now = clock().now();
  bool moved = false;
  if (used && pollers_active()) {
    if (now >= next_duty_) duties(now);
  } else {
    passes_ = kPlainPasses - 1;
    moved = pass();
  }
  if (used || moved) last_news_ = now;
  const TimePoint wake = next_wake();
  watcher_wakes_ = wake;
  watcher_knows_plain_ = looks_at_plain();
  leave_entry();
  return wake;
}

/// Whether somebody must look now and then although nobody is told of news: there are links without
/// a descriptor, or there may be.
bool Engine::looks_at_plain() const {
  return !plain_.empty() || region_ != nullptr ||
         (connector_->descriptor() < 0 && world_size() > 1);
}

/// Whether there is something to do before the watcher wakes by itself. Asked after every message:
/// the clock is read only where what it knows of already is not all.
bool Engine::watcher_oversleeps() {
  if (!watcher_) return false;
  const bool known = dirty_.empty() && (watcher_knows_plain_ || !looks_at_plain());
  const TimePoint due = known ? std::min(next_duty_, connector_timer_) : next_wake();
  if (due >= watcher_wakes_) return false;
  watcher_wakes_ = due;
  return true;
}

/// When somebody should look again although nothing happens.
TimePoint Engine::next_wake() const {
  // Links without descriptors: what comes on them while nobody waits. Deaths are told by
  // descriptors, and whoever waits is woken by the writer; so where nobody has used the fabric for
  // a while the looks are as rare as heartbeats, and mostly fall together with them.
  constexpr Duration kLookAtPlain = std::chrono::milliseconds(50);
  constexpr Duration kLookWhileIdle = std::chrono::milliseconds(250);
  constexpr Duration kIdleAfter = std::chrono::seconds(1);
  constexpr Duration kWhileUnwritten = std::chrono::milliseconds(5);
  TimePoint wake = std::min(next_duty_, connector_timer_);
  if (!options_.threads) return wake;
  if (!dirty_.empty()) {
    // A link that has had its share of a pass, and could take more, is told of by nobody.
    const bool at_once =
        !pollers_active() && std::any_of(dirty_.begin(), dirty_.end(), [](const Link* link) {
          return link->up() && !link->stuck && !link->in_service && link->protocol.has_output();
        });
    wake = std::min(wake, clock().now() + (at_once ? Duration::zero() : kWhileUnwritten));
  } else if (looks_at_plain()) {
    const TimePoint now = clock().now();
    const Duration look = now - kIdleAfter < last_news_ ? kLookAtPlain : kLookWhileIdle;
    wake = std::min(
        wake,
        now + (options_.heartbeat_limit > Duration::zero() ? std::min(look, interval_) : look));
  }
  return wake;
}

}  // namespace muster::transport
