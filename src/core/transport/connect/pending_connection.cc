// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/pending_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "core/net/socket_address.h"

namespace muster::transport {
namespace {

// The bytes that each side receives over a Unix socket (`handshake.h`): a greeting, then a proof;
// or a greeting, then a verdict and a proof.
constexpr std::size_t kGreetingBytes = 128;
constexpr std::size_t kConnectorSends = kGreetingBytes + 32;
constexpr std::size_t kAcceptorSends = kGreetingBytes + 1 + 32;
constexpr std::size_t kMostAtOnce = 1024;  // limit: of unauthenticated peers

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

PendingConnection::PendingConnection(GuardedDescriptor socket, const Handshake::Hello& hello,
                                     const Secret& secret, const ConnectionOptions& options)
    : socket_(std::move(socket)),
      talk_(options.way == Way::tcp
                ? Talk(std::in_place_type<TlsSession>, options.side, hello, secret)
                : Talk(std::in_place_type<Handshake>, options.side, hello, secret)),
      options_(options) {}

bool PendingConnection::done() const {
  return std::visit([](const auto& talk) { return talk.done(); }, talk_);
}

bool PendingConnection::failed() const {
  return std::visit([](const auto& talk) { return talk.failed(); }, talk_);
}

const Handshake::Peer& PendingConnection::peer() const {
  return std::visit([](const auto& talk) -> const Handshake::Peer& { return talk.peer(); }, talk_);
}

Handshake::Verdict PendingConnection::verdict() const {
  return std::visit([](const auto& talk) { return talk.verdict(); }, talk_);
}

AuthenticatedSocket PendingConnection::take() {
  AuthenticatedSocket taken{std::move(socket_), std::nullopt, peer()};
  if (auto* tls = std::get_if<TlsSession>(&talk_)) taken.tls.emplace(std::move(*tls));
  return taken;
}

std::uint32_t PendingConnection::epoll_events() const {
  if (options_.connecting) return EPOLLOUT;
  return outbox_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
}

PendingConnection::HandshakeProgress PendingConnection::fail(Status status) {
  failure_ = std::move(status);
  return HandshakeProgress::failed;
}

bool PendingConnection::finish_connect() {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error == 0) {
    if (!SocketAddress::peer_of(socket_.get()).ok()) return true;
    options_.connecting = false;
    if (!options_.connected) return true;
    if (auto session = options_.connected(socket_.get()))
      talk_.emplace<TlsSession>(std::move(*session));
    return true;
  }
  connect_refused_ = error == ECONNREFUSED;
  failure_ = Status(Code::network, errno_text(error));
  return false;
}

bool PendingConnection::flush() {
  outbox_ += std::visit([](auto& talk) { return talk.take_output(); }, talk_);
  while (!outbox_.empty()) {
    const ssize_t sent =
        ::send(socket_.get(), outbox_.data(), outbox_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && would_block(errno)) return true;
    if (sent < 0) {
      failure_ = Status(Code::network, errno_text(errno));
      return false;
    }
    outbox_.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

/// The greeting is read alone, so that `welcome` can be asked before the proof is checked.
std::size_t PendingConnection::wanted() const {
  if (received_ < kGreetingBytes) return kGreetingBytes - received_;
  if (options_.way == Way::tcp) return kMostAtOnce;
  const bool accepts = options_.side == Handshake::Side::acceptor;
  return (accepts ? kConnectorSends : kAcceptorSends) - received_;
}

int PendingConnection::receive_some(const Welcome& welcome) {
  std::array<std::byte, kMostAtOnce> input;
  const ssize_t got = ::recv(socket_.get(), input.data(), wanted(), MSG_DONTWAIT);
  if (got < 0 && errno == EINTR) return 1;
  if (got < 0 && would_block(errno)) return 0;
  if (got <= 0) {
    failure_ = got < 0 ? Status(Code::network, errno_text(errno))
                       : Status(Code::closed,
                                "the connection was cut during the handshake, without an "
                                "authenticated end: the other side has ended or was busy, or "
                                "somebody on the network cut it");
    return -1;
  }
  if (options_.side == Handshake::Side::acceptor && received_ >= kGreetingBytes && !welcome(peer()))
    std::visit([](auto& talk) { talk.set_unwelcome(); }, talk_);
  received_ += static_cast<std::size_t>(got);
  const ConstBytes bytes = ConstBytes(input).first(static_cast<std::size_t>(got));
  std::visit([bytes](auto& talk) { talk.feed(bytes); }, talk_);
  return 1;
}

/// Drains what was sent along with a refused greeting. Left unread, it would reset the connection
/// on close and discard the refusal.
void PendingConnection::drain() const {
  std::array<std::byte, kMostAtOnce> ignored;
  [[maybe_unused]] const ssize_t got =
      ::recv(socket_.get(), ignored.data(), ignored.size(), MSG_DONTWAIT);
}

PendingConnection::HandshakeProgress PendingConnection::advance(const Welcome& welcome) {
  if (options_.connecting && !finish_connect()) return HandshakeProgress::failed;
  if (options_.connecting) return HandshakeProgress::waiting;
  if (!flush()) return HandshakeProgress::failed;
  while (!done() && !failed()) {
    const int got = receive_some(welcome);
    if (got < 0) return HandshakeProgress::failed;
    if (got == 0) break;
    if (!flush() && !failed()) return HandshakeProgress::failed;
  }
  if (failed()) {
    drain();
    // Lets a refusal that is on its way arrive; fails if the peer is gone.
    ::shutdown(socket_.get(), SHUT_WR);
    return fail(std::visit([](const auto& talk) { return talk.failure(); }, talk_));
  }
  // The acceptor's proof must have left before the stream's first bytes may follow it.
  return done() && outbox_.empty() ? HandshakeProgress::done : HandshakeProgress::waiting;
}

}  // namespace muster::transport
