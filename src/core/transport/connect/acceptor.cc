// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/acceptor.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/net/this_host.h"

namespace muster::transport {
namespace {

constexpr int kAcceptsAPass = 64;                           // limit: fairness
constexpr Duration kQuiet = std::chrono::seconds(10);       // the log says it once
constexpr Duration kPause = std::chrono::milliseconds(20);  // limit: descriptors run out
// An authentic peer finishes its handshake well within this time. Connections still pending then
// are unauthenticated or gone.
constexpr Duration kLimitWithoutDescriptors =
    std::chrono::milliseconds(250);  // limit: of a handshake

GuardedDescriptor open_reserve() {
  return GuardedDescriptor(Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
}

}  // namespace

Status Acceptor::serve(Descriptor listener) {
  if (!epoll_) {
    epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
    if (!epoll_)
      return Status(Code::exhausted, "cannot make an epoll descriptor: " + errno_text(errno));
    reserve_ = open_reserve();
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = listener.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener.get(), &event) != 0) {
    return Status(Code::exhausted, "cannot watch a listening socket: " + errno_text(errno));
  }
  listeners_.emplace_back(std::move(listener));
  return {};
}

void Acceptor::watch_listeners(bool on) {
  paused_ = !on;
  for (const auto& listener : listeners_) {
    epoll_event event{};
    event.events = on ? EPOLLIN : 0u;
    event.data.fd = listener.get();
    // The set holds it, and a change takes no memory.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener.get(), &event);
  }
}

bool Acceptor::poll(TimePoint now) {
  bool moved = false;
  if (paused_ && resume_at_ <= now) {
    if (!reserve_) reserve_ = open_reserve();
    watch_listeners(true);
  }
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    const auto connection = by_descriptor_.find(fd);
    if (connection != by_descriptor_.end()) {
      advance(connection->second, now);
      moved = true;
      continue;
    }
    const bool listens = std::any_of(listeners_.begin(), listeners_.end(),
                                     [fd](const auto& each) { return each.get() == fd; });
    for (int accepted = 0; listens && accepted < kAcceptsAPass && accept_from(fd, now); ++accepted)
      moved = true;
  }
  // Checked last: input that arrived in time counts, even if this process itself was delayed.
  while (!pending_.empty() && pending_.front().limit() <= now) {
    drop_oldest("it did not prove the job's secret within " + describe(options_.handshake_limit),
                now);
    moved = true;
  }
  return moved;
}

bool Acceptor::accept_from(int listener, TimePoint now) {
  Descriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) {
    if (errno == EINTR || errno == ECONNABORTED) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    const bool scarce = lacks_room(errno);
    if (scarce && find_descriptor(now)) return true;
    if (quiet_until_ <= now)
      log(LogLevel::warning,
          "cannot accept connections for now: " + errno_text(errno) + "; trying again shortly" +
              (scarce ? " (raise the limit on open files, ulimit -n, or close what is not needed)"
                      : ""));
    quiet_until_ = now + kQuiet;
    watch_listeners(false);
    resume_at_ = now + kPause;
    return false;
  }
  if (options_.admit && !options_.admit(socket.get())) {
    refuse(socket.get(), "it may not connect", now);
    return true;
  }
  if (pending_.size() >= options_.most_pending + expected_)
    drop_oldest("others need its place", now);
  const int fd = socket.get();
  pending_.emplace_back(
      GuardedDescriptor(std::move(socket)), options_.hello, secret_,
      PendingConnection::ConnectionOptions{.side = Handshake::Side::acceptor,
                                           .way = options_.way,
                                           .since = now,
                                           .limit = now + options_.handshake_limit});
  const auto connection = std::prev(pending_.end());
  by_descriptor_[fd] = connection;
  epoll_event event{};
  event.events = connection->epoll_events();
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    drop(connection);
  } else {
    advance(connection, now);
  }
  return true;
}

/// Tries to free one descriptor.
bool Acceptor::find_descriptor(TimePoint now) {
  const int error = errno;
  if (!pending_.empty() && pending_.front().since() + kLimitWithoutDescriptors <= now) {
    drop_oldest("others need its descriptor", now);
    return true;
  }
  if (reserve_) {
    reserve_.reset();
    return true;
  }
  errno = error;
  return false;
}

void Acceptor::drop_oldest(const std::string& why, TimePoint now) {
  refuse(pending_.front().descriptor(), why, now);
  drop(pending_.begin());
}

void Acceptor::refuse(int socket, const std::string& why, TimePoint now) {
  const auto from = SocketAddress::peer_of(socket);
  const std::string who =
      options_.way == Way::tcp && from ? from->text() : "a process of this host";
  if (const auto line = refusals_.note("refused a connection of " + who + ": " + why, now))
    log(LogLevel::warning, *line);
}

void Acceptor::advance(Pending::iterator connection, TimePoint now) {
  switch (connection->advance(options_.welcome)) {
    case PendingConnection::HandshakeProgress::waiting: {
      epoll_event event{};
      event.events = connection->epoll_events();
      event.data.fd = connection->descriptor();
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection->descriptor(), &event);
      return;
    }
    case PendingConnection::HandshakeProgress::failed:
      // Not counted: a crossing that a rank lost, and a peer that disconnected by itself.
      if (connection->failure().code() == Code::refused && !connection->lost_crossing())
        refuse(connection->descriptor(), connection->failure().message(), now);
      else if (logs(LogLevel::debug))
        log(LogLevel::debug, "a connection was turned away: " + connection->failure().message());
      drop(connection);
      return;
    case PendingConnection::HandshakeProgress::done: {
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->descriptor(), nullptr);
      by_descriptor_.erase(connection->descriptor());
      AuthenticatedSocket socket = connection->take();
      pending_.erase(connection);
      options_.arrived(std::move(socket));
      return;
    }
  }
}

void Acceptor::drop(Pending::iterator connection) {
  by_descriptor_.erase(connection->descriptor());
  pending_.erase(connection);  // closing a socket takes it out of the epoll set
}

TimePoint Acceptor::next_timer() const {
  TimePoint next = pending_.empty() ? TimePoint::max() : pending_.front().limit();
  return paused_ ? std::min(next, resume_at_) : next;
}

Result<std::vector<SocketAddress>> addresses_to_listen_on(const ConnectorOptions& options,
                                                          bool others_may_come,
                                                          TimePoint deadline) {
  std::vector<SocketAddress> addresses;
  for (const std::string& name : options.interfaces) {
    auto found = interface_addresses(name);
    if (!found) return found.status().with_context("choosing the network interfaces for links");
    addresses.push_back(found->front());
  }
  if (!addresses.empty()) return addresses;
  if (others_may_come && options.any_host && options.towards.empty()) {
    if (const auto address = address_of_default_route())
      return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
  }
  if (others_may_come && !options.towards.empty()) {
    auto target = resolve(options.towards, 9, deadline);
    if (!target)
      return target.status().with_context(
          "choosing the address for links, the one that routes to the store");
    for (const SocketAddress& each : *target) {
      if (auto address = address_towards(each))
        return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
    }
    return address_towards(target->front())
        .status()
        .with_context("choosing the address for links, the one that routes to the store");
  }
  for (const char* loopback : {"127.0.0.1", "::1"}) {
    const auto address = SocketAddress::numeric(loopback, 0);
    if (address.ok() && listen_on(*address, 1).ok()) return std::vector<SocketAddress>{*address};
  }
  return Status(Code::network,
                "this host has no loopback address to listen on (is the interface lo up?)");
}

}  // namespace muster::transport
