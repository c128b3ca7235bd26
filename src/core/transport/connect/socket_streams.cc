// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/socket_streams.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <tuple>

#include "core/base/log/log.h"
#include "core/net/link_figures.h"
#include "core/transport/byte_stream.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

constexpr Duration kHandshakeLimit = std::chrono::seconds(5);  // limit: of a handshake
// An accepted bundle outlives the attempt of its connector, which may still complete it. This is
// less than a call waits for a link, so a rank that waits for a bundle whose connector has died has
// time to find that out by an attempt of its own.
constexpr Duration kBundleLimit = kHandshakeLimit + std::chrono::seconds(2);  // limit: patience
constexpr Duration kFirstPause = std::chrono::milliseconds(5);                // limit: of retries
constexpr Duration kLongestPause = std::chrono::milliseconds(500);            // limit: of retries
// A rank listens from before its address is published until it ends. After this many refusals in a
// row, over one second, it has ended.
constexpr std::size_t kRefusalsThatTell = 9;  // limit: of retries
constexpr int kBacklog = 1024;                // limit: of a socket

}  // namespace

SocketStreams::SocketStreams(Handshake::Hello hello, Secret secret)
    : hello_(hello),
      secret_(secret),
      acceptor_(AcceptorOptions{
                    .hello = hello,
                    .way = Way::tcp,
                    .admit = {},
                    .welcome = [this](const Handshake::Peer& peer) { return welcomes(peer); },
                    .arrived = [this](AuthenticatedSocket with) { arrived(std::move(with)); }},
                std::move(secret)) {}

Status SocketStreams::listen(const std::vector<SocketAddress>& addresses, bool pinned) {
  pinned_ = pinned;
  epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  for (const SocketAddress& address : addresses) {
    auto listener = listen_on(address, kBacklog);
    if (!listener) return listener.status().with_context("listening for other ranks");
    auto bound = SocketAddress::local_of(listener->get());
    if (!bound) return bound.status();
    addresses_.push_back(*bound);
    if (Status served = acceptor_.serve(std::move(*listener)); !served) return served;
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = acceptor_.descriptor();
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, acceptor_.descriptor(), &event) != 0) {
    return Status(Code::exhausted, "cannot watch the listening sockets: " + errno_text(errno));
  }
  return {};
}

void SocketStreams::settle(std::vector<LinkPeer> book, ConnectorEvents& events) {
  book_ = std::move(book);
  linked_.assign(book_.size(), false);
  events_ = &events;
}

bool SocketStreams::welcomes(const Handshake::Peer& who) const {
  const bool known = who.rank >= 0 && static_cast<std::size_t>(who.rank) < book_.size() &&
                     who.rank != hello_.rank && who.world_size == hello_.world_size &&
                     who.note == peer(who.rank).nonce && is_possible(who.strand);
  if (!known || linked_[static_cast<std::size_t>(who.rank)]) return false;
  if (who.strand.number > 0) {
    const auto bundle = bundles_.find(who.rank);
    return bundle != bundles_.end() && bundle->second.lacks(who.strand) &&
           bundle->second.size() - 1 <= spare_strands(who.rank);
  }
  const auto mine = attempts_.find(who.rank);
  const bool mine_is_under_way = mine != attempts_.end() && mine->second.under_way();
  return !mine_is_under_way || who.rank < hello_.rank;
}

PendingConnection* SocketStreams::Attempt::with(int descriptor) const {
  if (connection && connection->descriptor() == descriptor) return connection.get();
  const auto found = std::ranges::find_if(
      others, [descriptor](const auto& each) { return each->descriptor() == descriptor; });
  return found == others.end() ? nullptr : found->get();
}

/// A bundle that the peer may have accepted as a whole is not given up: the peer would have a link
/// that ends at once, and take this rank for dead. It ends what it does not accept.
TimePoint SocketStreams::Attempt::limit() const {
  if (!bundle) return connection->limit();
  const bool is_unfinished = std::ranges::any_of(
      others, [](const auto& each) { return each->descriptor() >= 0 && !each->may_be_accepted(); });
  return is_unfinished ? bundle->limit() : TimePoint::max();
}

void SocketStreams::Attempt::drop() {
  connection.reset();
  bundle.reset();
  others.clear();
}

void SocketStreams::connect(int peer, TimePoint deadline) {
  if (peer == hello_.rank || peer < 0 || static_cast<std::size_t>(peer) >= book_.size()) return;
  const auto [at, fresh] = attempts_.try_emplace(peer);
  if (!fresh) return;
  at->second.deadline = deadline;
  at->second.awaits_peer = bundles_.contains(peer);
}

Descriptor SocketStreams::open_towards(const Attempt& attempt) {
  Descriptor socket(
      ::socket(attempt.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return socket;
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (pinned_ && attempt.index < addresses_.size() &&
      addresses_[attempt.index].family() == attempt.address.family()) {
    const auto source = SocketAddress::numeric(addresses_[attempt.index].host(), 0);
    if (source.ok() && ::bind(socket.get(), source->raw(), source->length()) != 0)
      return Descriptor();
  }
  if (::connect(socket.get(), attempt.address.raw(), attempt.address.length()) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    return Descriptor();
  }
  return socket;
}

void SocketStreams::start(int to, Attempt& attempt, TimePoint now) {
  const auto& addresses = peer(to).addresses;
  // Both sides start with the same index in their lists of interfaces. It differs between the pairs
  // that two hosts make of their first ranks, their second ones and so on, as collectives use them.
  attempt.index =
      (static_cast<std::size_t>(to + hello_.rank) / 2 + attempt.tries) % addresses.size();
  attempt.address = addresses[attempt.index];
  ++attempt.tries;
  attempt.strand = {};
  attempt.connection = begin(attempt, attempt.strand, now,
                             [this, to](int socket) { return first_of_bundle(to, socket); });
  if (!attempt.connection) retry(attempt, now);
}

/// Null, and `last` says why, where there is no socket for it.
std::unique_ptr<PendingConnection> SocketStreams::begin(Attempt& attempt,
                                                        const Handshake::Strand& strand,
                                                        TimePoint now, Connected connected) {
  Descriptor socket = open_towards(attempt);
  if (!socket) {
    attempt.refusals += errno == ECONNREFUSED ? 1 : 0;
    attempt.last = Status(Code::network, errno_text(errno));
    return nullptr;
  }
  epoll_event event{};
  event.events = EPOLLOUT;
  event.data.fd = socket.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) {
    attempt.last = Status(Code::exhausted, errno_text(errno));
    return nullptr;
  }
  return std::make_unique<PendingConnection>(
      GuardedDescriptor(std::move(socket)), hello_as(strand), secret_,
      PendingConnection::ConnectionOptions{
          .connecting = true,
          .since = now,
          .limit = std::min(attempt.deadline, now + kHandshakeLimit),
          .connected = std::move(connected)});
}

Handshake::Hello SocketStreams::hello_as(const Handshake::Strand& strand) const {
  Handshake::Hello hello = hello_;
  hello.strand = strand;
  return hello;
}

/// The session of a connection that is the first of several; none where one is enough.
std::optional<TlsSession> SocketStreams::first_of_bundle(int to, int socket) {
  Attempt& attempt = attempts_.at(to);
  const auto figures = link_figures(socket);
  if (attempt.single || !figures) return std::nullopt;
  std::uint16_t of =
      strands_for(figures->round_trip, tunables().strand_trip, tunables().most_strands);
  if (of > 1) of = static_cast<std::uint16_t>(std::min<std::size_t>(of, 1 + spare_strands(to)));
  if (of == 1 || !has_time_for_bundle(figures->round_trip, attempt.deadline - now_))
    return std::nullopt;
  attempt.strand = {.number = 0, .of = of, .bundle = ++bundles_begun_};
  return TlsSession(TlsSession::Side::connector, hello_as(attempt.strand), secret_);
}

/// How many connections the link to the peer may have besides its first one.
std::size_t SocketStreams::spare_strands(int peer) const {
  std::size_t used = further_strands_;
  for (const auto& [rank, bundle] : bundles_) {
    if (rank != peer) used += bundle.size() - 1;
  }
  for (const auto& [rank, attempt] : attempts_) {
    if (rank != peer && attempt.under_way()) used += attempt.strand.of - 1u;
  }
  const std::size_t most = most_further_strands();
  return most - std::min(most, used);
}

void SocketStreams::begin_others(Attempt& attempt, TimePoint now) {
  for (std::uint16_t number = 1; number < attempt.strand.of; ++number) {
    Handshake::Strand strand = attempt.strand;
    strand.number = number;
    auto connection = begin(attempt, strand, now);
    if (!connection) return give_up_bundle(attempt, now);
    attempt.others.push_back(std::move(connection));
  }
}

void SocketStreams::advance(int to, PendingConnection& connection, TimePoint now) {
  switch (connection.advance([](const Handshake::Peer&) { return true; })) {
    case PendingConnection::HandshakeProgress::waiting: {
      epoll_event event{};
      event.events = connection.epoll_events();
      event.data.fd = connection.descriptor();
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.descriptor(), &event);
      return;
    }
    case PendingConnection::HandshakeProgress::failed: return on_failure(to, connection, now);
    case PendingConnection::HandshakeProgress::done: return finish(to, connection, now);
  }
}

void SocketStreams::finish(int to, PendingConnection& connection, TimePoint now) {
  Attempt& attempt = attempts_.at(to);
  const Handshake::Peer& who = connection.peer();
  if (who.rank != to || who.note != peer(to).nonce || who.world_size != hello_.world_size) {
    return fail(
        to, Status(Code::refused,
                   "connecting to " + peer(to).name + " at " + attempt.address.text() + ": rank " +
                       std::to_string(who.rank) + " of " + std::to_string(who.world_size) +
                       " answered there, in another life than the one it published; was a rank "
                       "restarted alone?",
                   {to}));
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.descriptor(), nullptr);
  if (!attempt.bundle) {
    // Half of the time is left for a single connection.
    const Duration limit = std::min(kHandshakeLimit, (attempt.deadline - now) / 2);
    attempt.bundle = std::make_unique<Bundle>(attempt.strand, now + limit);
  }
  const auto other =
      std::ranges::find(attempt.others, &connection, [](const auto& each) { return each.get(); });
  const bool is_first = &connection == attempt.connection.get();
  attempt.bundle->add(is_first ? 0 : 1 + static_cast<std::size_t>(other - attempt.others.begin()),
                      connection.take());
  if (attempt.bundle->is_whole()) return establish(to, attempt.bundle->take());
  if (!is_first) return;
  attempt.connection.reset();
  begin_others(attempt, now);
}

/// A peer's connection to this rank has been accepted.
void SocketStreams::arrived(AuthenticatedSocket with) {
  const int rank = with.peer.rank;
  const Handshake::Strand strand = with.peer.strand;
  if (strand.number == 0) {
    // It replaces one that the peer has given up.
    bundles_.insert_or_assign(rank, Bundle(strand, now_ + kBundleLimit));
    const auto mine = attempts_.find(rank);
    if (mine != attempts_.end()) {
      mine->second.drop();
      mine->second.awaits_peer = true;
    }
  }
  const auto bundle = bundles_.find(rank);
  if (bundle == bundles_.end() || !bundle->second.lacks(strand)) return;
  bundle->second.add(strand.number, std::move(with));
  if (bundle->second.is_whole()) establish(rank, bundle->second.take());
}

void SocketStreams::establish(int rank, std::vector<AuthenticatedSocket> sockets) {
  attempts_.erase(rank);
  bundles_.erase(rank);
  linked_[static_cast<std::size_t>(rank)] = true;
  further_strands_ += sockets.size() - 1;
  if (logs(LogLevel::debug)) {
    const int first = sockets.front().socket.get();
    const auto here = SocketAddress::local_of(first), there = SocketAddress::peer_of(first);
    log(LogLevel::debug,
        "connected to " + peer(rank).name + " over TCP" +
            (here && there ? ", from " + here->text() + " to " + there->text() : std::string()) +
            (sockets.size() == 1 ? "" : ", by " + std::to_string(sockets.size()) + " connections"));
  }
  events_->on_stream(rank, stream_over(std::move(sockets)));
}

void SocketStreams::on_failure(int to, const PendingConnection& connection, TimePoint now) {
  Attempt& attempt = attempts_.at(to);
  attempt.last = connection.failure();
  if (attempt.bundle) return give_up_bundle(attempt, now);
  attempt.refusals = connection.connect_refused() ? attempt.refusals + 1 : 0;
  if (connection.lost_crossing()) {
    attempt.drop();
    // The lower rank has its own connection to us under way.
    attempt.awaits_peer = to < hello_.rank;
    if (!attempt.awaits_peer) retry(attempt, now);
    return;
  }
  const bool in_the_clear = connection.failed_in_the_clear();
  if (!in_the_clear) {
    attempt.clear.forget();
  } else if (attempt.clear.tell(now, attempt.deadline, kLongestPause)) {
    attempt.last = ClearAnswers::told(attempt.last);
  } else {
    return retry(attempt, now);
  }
  if (attempt.last.code() == Code::refused) {
    return fail(to, Status(Code::refused,
                           "connecting to " + peer(to).name + " at " + attempt.address.text() +
                               ": " + attempt.last.message(),
                           {to}));
  }
  retry(attempt, now);
}

/// Not all of its connections can be had: descriptors run out, or something on the way bounds them.
void SocketStreams::give_up_bundle(Attempt& attempt, TimePoint now) {
  attempt.single = true;
  if (logs(LogLevel::debug))
    log(LogLevel::debug, "one connection instead of " + std::to_string(attempt.strand.of) + " to " +
                             attempt.address.text() + ": " + attempt.last.message());
  retry(attempt, now);
}

void SocketStreams::retry(Attempt& attempt, TimePoint now) {
  attempt.drop();
  const Duration pause = kFirstPause * (1u << std::min<std::size_t>(attempt.tries, 7));
  attempt.retry_at = now + std::min(pause, kLongestPause);
}

void SocketStreams::fail(int to, Status cause) {
  attempts_.erase(to);
  events_->on_connect_failed(to, std::move(cause));
}

void SocketStreams::give_up(int peer, const Status& cause) {
  bundles_.erase(peer);
  if (attempts_.contains(peer)) fail(peer, cause);
}

bool SocketStreams::poll(TimePoint now) {
  now_ = now;
  std::size_t missing = 0;
  for (const auto& [rank, bundle] : bundles_) missing += bundle.missing();
  acceptor_.expect(missing);
  bool moved = acceptor_.poll(now);
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    const auto at = std::ranges::find_if(
        attempts_, [fd](const auto& each) { return each.second.with(fd) != nullptr; });
    if (at == attempts_.end()) continue;
    advance(at->first, *at->second.with(fd), now);
    moved = true;
  }
  return end_late_ones(now) || moved;
}

/// Ends what has come to its limit or deadline, and begins what is due.
bool SocketStreams::end_late_ones(TimePoint now) {
  bool moved = std::erase_if(bundles_, [this, now](const auto& each) {
                 const bool late = each.second.limit() <= now;
                 const auto mine = attempts_.find(each.first);
                 if (late && mine != attempts_.end()) mine->second.awaits_peer = false;
                 return late;
               }) > 0;
  // Limits are checked last: an answer that arrived in time counts, even if this process itself was
  // delayed.
  for (auto next = attempts_.begin(); next != attempts_.end();) {
    const auto [to, attempt] = std::tie(next->first, next->second);
    ++next;  // what follows may end this attempt
    const std::string where =
        peer(to).name + " at " +
        (attempt.tries > 0 ? attempt.address.text() : peer(to).addresses.front().text());
    if (attempt.refusals >= kRefusalsThatTell) {
      fail(to, Status(Code::peer_failed,
                      "nobody listens any more for " + where +
                          ": its process has ended, or a firewall is in between",
                      {to}));
    } else if (attempt.deadline <= now) {
      fail(to, Status(Code::timed_out,
                      "no connection to " + where + " before the deadline" +
                          (attempt.last.ok() ? "" : "; last: " + attempt.last.message()) +
                          "; check that the address can be reached from this host "
                          "(MUSTER_SOCKET_IFNAME chooses the interface)",
                      {to}));
    } else if (attempt.under_way() && attempt.limit() <= now) {
      attempt.last = Status(Code::timed_out, "no answer within " + describe(kHandshakeLimit));
      attempt.bundle ? give_up_bundle(attempt, now) : retry(attempt, now);
    } else if (!attempt.under_way() && !attempt.awaits_peer && attempt.retry_at <= now) {
      start(to, attempt, now);
    } else {
      continue;
    }
    moved = true;
  }
  return moved;
}

TimePoint SocketStreams::next_timer() const {
  TimePoint next = acceptor_.next_timer();
  for (const auto& [peer, bundle] : bundles_) next = std::min(next, bundle.limit());
  for (const auto& [peer, attempt] : attempts_) {
    next = std::min(next, attempt.deadline);
    if (attempt.under_way()) {
      next = std::min(next, attempt.limit());
    } else if (!attempt.awaits_peer) {
      next = std::min(next, attempt.retry_at);
    }
  }
  return next;
}

}  // namespace muster::transport
