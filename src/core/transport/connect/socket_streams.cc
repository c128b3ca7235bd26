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
#include "core/transport/byte_stream.h"

namespace muster::transport {
namespace {

constexpr Duration kHandshakeLimit = std::chrono::seconds(5);       // limit: of a handshake
constexpr Duration kFirstPause = std::chrono::milliseconds(5);      // limit: of retries
constexpr Duration kLongestPause = std::chrono::milliseconds(500);  // limit: of retries
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
                    .arrived = [this](AuthenticatedSocket with) { establish(std::move(with)); }},
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
                     who.note == peer(who.rank).nonce;
  if (!known || linked_[static_cast<std::size_t>(who.rank)]) return false;
  const auto mine = attempts_.find(who.rank);
  const bool mine_is_under_way = mine != attempts_.end() && mine->second.connection != nullptr;
  return !mine_is_under_way || who.rank < hello_.rank;
}

void SocketStreams::connect(int peer, TimePoint deadline) {
  if (peer == hello_.rank || peer < 0 || static_cast<std::size_t>(peer) >= book_.size()) return;
  const auto [at, fresh] = attempts_.try_emplace(peer);
  if (fresh) at->second.deadline = deadline;
}

Descriptor SocketStreams::open_towards(Attempt& attempt, std::size_t index) {
  Descriptor socket(
      ::socket(attempt.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return socket;
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (pinned_ && index < addresses_.size() &&
      addresses_[index].family() == attempt.address.family()) {
    const auto source = SocketAddress::numeric(addresses_[index].host(), 0);
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
  const std::size_t index =
      (static_cast<std::size_t>(to + hello_.rank) / 2 + attempt.tries) % addresses.size();
  attempt.address = addresses[index];
  ++attempt.tries;
  Descriptor socket = open_towards(attempt, index);
  if (!socket) {
    attempt.refusals += errno == ECONNREFUSED ? 1 : 0;
    attempt.last = Status(Code::network, errno_text(errno));
    return retry(attempt, now);
  }
  epoll_event event{};
  event.events = EPOLLOUT;
  event.data.fd = socket.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) {
    attempt.last = Status(Code::exhausted, errno_text(errno));
    return retry(attempt, now);
  }
  attempt.connection = std::make_unique<PendingConnection>(
      GuardedDescriptor(std::move(socket)), hello_, secret_,
      PendingConnection::ConnectionOptions{
          .connecting = true,
          .since = now,
          .limit = std::min(attempt.deadline, now + kHandshakeLimit)});
}

void SocketStreams::advance(int to, TimePoint now) {
  Attempt& attempt = attempts_.at(to);
  switch (attempt.connection->advance([](const Handshake::Peer&) { return true; })) {
    case PendingConnection::HandshakeProgress::waiting: {
      epoll_event event{};
      event.events = attempt.connection->epoll_events();
      event.data.fd = attempt.connection->descriptor();
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, attempt.connection->descriptor(), &event);
      return;
    }
    case PendingConnection::HandshakeProgress::failed: return on_failure(to, attempt, now);
    case PendingConnection::HandshakeProgress::done: return finish(to, attempt);
  }
}

void SocketStreams::finish(int to, Attempt& attempt) {
  const Handshake::Peer& who = attempt.connection->peer();
  if (who.rank != to || who.note != peer(to).nonce || who.world_size != hello_.world_size) {
    return fail(
        to, Status(Code::refused,
                   "connecting to " + peer(to).name + " at " + attempt.address.text() + ": rank " +
                       std::to_string(who.rank) + " of " + std::to_string(who.world_size) +
                       " answered there, in another life than the one it published; was a rank "
                       "restarted alone?",
                   {to}));
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, attempt.connection->descriptor(), nullptr);
  establish(attempt.connection->take());
}

void SocketStreams::establish(AuthenticatedSocket with) {
  const int rank = with.peer.rank;
  attempts_.erase(rank);
  linked_[static_cast<std::size_t>(rank)] = true;
  if (logs(LogLevel::debug)) {
    const auto here = SocketAddress::local_of(with.socket.get()),
               there = SocketAddress::peer_of(with.socket.get());
    log(LogLevel::debug,
        "connected to " + peer(rank).name + " over TCP" +
            (here && there ? ", from " + here->text() + " to " + there->text() : std::string()));
  }
  events_->on_stream(
      rank, make_tls_stream(make_tcp_stream(std::move(with.socket)), std::move(*with.tls)));
}

void SocketStreams::on_failure(int to, Attempt& attempt, TimePoint now) {
  const PendingConnection& connection = *attempt.connection;
  attempt.last = connection.failure();
  attempt.refusals = connection.connect_refused() ? attempt.refusals + 1 : 0;
  if (connection.lost_crossing()) {
    attempt.connection.reset();
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

void SocketStreams::retry(Attempt& attempt, TimePoint now) {
  attempt.connection.reset();
  const Duration pause = kFirstPause * (1u << std::min<std::size_t>(attempt.tries, 7));
  attempt.retry_at = now + std::min(pause, kLongestPause);
}

void SocketStreams::fail(int to, Status cause) {
  attempts_.erase(to);
  events_->on_connect_failed(to, std::move(cause));
}

void SocketStreams::give_up(int peer, const Status& cause) {
  if (attempts_.contains(peer)) fail(peer, cause);
}

bool SocketStreams::poll(TimePoint now) {
  bool moved = acceptor_.poll(now);
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    const auto at = std::find_if(attempts_.begin(), attempts_.end(), [fd](const auto& each) {
      return each.second.connection && each.second.connection->descriptor() == fd;
    });
    if (at == attempts_.end()) continue;
    advance(at->first, now);
    moved = true;
  }
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
    } else if (attempt.connection && attempt.connection->limit() <= now) {
      attempt.last = Status(Code::timed_out, "no answer within " + describe(kHandshakeLimit));
      retry(attempt, now);
    } else if (!attempt.connection && !attempt.awaits_peer && attempt.retry_at <= now) {
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
  for (const auto& [peer, attempt] : attempts_) {
    next = std::min(next, attempt.deadline);
    if (attempt.connection) {
      next = std::min(next, attempt.connection->limit());
    } else if (!attempt.awaits_peer) {
      next = std::min(next, attempt.retry_at);
    }
  }
  return next;
}

}  // namespace muster::transport
