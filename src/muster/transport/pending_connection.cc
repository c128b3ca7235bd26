#include "muster/transport/pending_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "muster/base/socket_address.h"

namespace muster::transport {
namespace {

// What each side receives in the handshake (`handshake.h`): a greeting, then a proof; or a
// greeting, then a verdict and a proof.
constexpr std::size_t kGreetingBytes = 128;
constexpr std::size_t kConnectorSends = kGreetingBytes + 32;
constexpr std::size_t kAcceptorSends = kGreetingBytes + 1 + 32;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

PendingConnection::PendingConnection(GuardedDescriptor socket, Handshake::Side side,
                                     const Handshake::Hello& hello, const Secret& secret,
                                     bool connecting, TimePoint since, TimePoint limit)
    : socket_(std::move(socket)),
      handshake_(side, hello, secret),
      side_(side),
      connecting_(connecting),
      since_(since),
      limit_(limit) {}

std::uint32_t PendingConnection::epoll_events() const {
  if (connecting_) return EPOLLOUT;
  return outbox_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
}

PendingConnection::Progress PendingConnection::fail(Status status) {
  failure_ = std::move(status);
  return Progress::failed;
}

bool PendingConnection::finish_connect() {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == 0) {
    if (SocketAddress::peer_of(socket_.get()).ok()) connecting_ = false;
    return true;
  }
  nobody_there_ = error == ECONNREFUSED;
  failure_ = Status(Code::network, errno_text(error));
  return false;
}

bool PendingConnection::flush() {
  outbox_ += handshake_.take_output();
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

int PendingConnection::receive_some(const Welcome& welcome) {
  // The greeting is taken alone, so that the peer can be asked about before its proof is looked at.
  const std::size_t all = side_ == Handshake::Side::acceptor ? kConnectorSends : kAcceptorSends;
  const std::size_t wanted =
      received_ < kGreetingBytes ? kGreetingBytes - received_ : all - received_;
  std::array<std::byte, kAcceptorSends> input;
  const ssize_t got =
      ::recv(socket_.get(), input.data(), std::min(wanted, input.size()), MSG_DONTWAIT);
  if (got < 0 && errno == EINTR) return 1;
  if (got < 0 && would_block(errno)) return 0;
  if (got <= 0) {
    failure_ = got < 0 ? Status(Code::network, errno_text(errno))
                       : Status(Code::closed, "the other side hung up during the handshake");
    return -1;
  }
  if (side_ == Handshake::Side::acceptor && received_ >= kGreetingBytes &&
      !welcome(handshake_.peer()))
    handshake_.set_unwelcome();
  received_ += static_cast<std::size_t>(got);
  handshake_.feed(ConstBytes(input).first(static_cast<std::size_t>(got)));
  return 1;
}

PendingConnection::Progress PendingConnection::advance(const Welcome& welcome) {
  if (connecting_ && !finish_connect()) return Progress::failed;
  if (connecting_) return Progress::waiting;
  if (!flush()) return Progress::failed;
  while (!handshake_.done() && !handshake_.failed()) {
    const int got = receive_some(welcome);
    if (got < 0) return Progress::failed;
    if (got == 0) break;
    if (!flush() && !handshake_.failed()) return Progress::failed;
  }
  if (handshake_.failed()) {
    ::shutdown(socket_.get(), SHUT_WR);  // lets a refusal that is on its way arrive
    return fail(handshake_.failure());
  }
  // The acceptor's proof must have left before the stream's first bytes may follow it.
  return handshake_.done() && outbox_.empty() ? Progress::done : Progress::waiting;
}

}  // namespace muster::transport
