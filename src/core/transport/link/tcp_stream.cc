// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/net/socket_address.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

constexpr std::size_t kPiecesACall = 64;  // limit: of a system call
constexpr std::size_t kTogetherBytes = fixed::kInlineCopy;

class TcpStream final : public ByteStream {
 public:
  explicit TcpStream(GuardedDescriptor socket) : socket_(std::move(socket)) {
    const int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
    const auto peer = SocketAddress::peer_of(socket_.get());
    peer_ = peer.ok() ? peer->text() : "an unknown address";
  }

  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    std::size_t total = 0;
    for (const ConstBytes& piece : pieces) total += piece.size();
    if (total > kTogetherBytes) {
      return gathering(pieces, "sending to ", [this](msghdr& message) {
        return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      });
    }
    if (total == 0) return std::size_t{0};
    // For this few bytes a copy costs less than the kernel's handling of an iovec list.
    std::array<std::byte, kTogetherBytes> together;
    std::size_t at = 0;
    for (const ConstBytes& piece : pieces) {
      if (piece.empty()) continue;
      std::memcpy(together.data() + at, piece.data(), piece.size());
      at += piece.size();
    }
    return moving("sending to ", [&] {
      return ::send(socket_.get(), together.data(), total, MSG_NOSIGNAL | MSG_DONTWAIT);
    });
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    const auto ends = [this](ssize_t got) {
      if (got == 0) failure_ = Status(Code::closed, peer_ + " has closed its connection");
      return got;
    };
    if (pieces.size() == 1 && !pieces.front().empty()) {
      return moving("receiving from ", [&] {
        return ends(
            ::recv(socket_.get(), pieces.front().data(), pieces.front().size(), MSG_DONTWAIT));
      });
    }
    return gathering(pieces, "receiving from ", [&](msghdr& message) {
      return ends(::recvmsg(socket_.get(), &message, MSG_DONTWAIT));
    });
  }
  int descriptor() const override { return socket_.get(); }
  const char* kind() const override { return "tcp"; }

 private:
  template <class Bytes, class Call>
  Result<std::size_t> gathering(std::span<const Bytes> pieces, const char* what, Call call) {
    std::array<iovec, kPiecesACall> vector;
    msghdr message{};
    for (const Bytes& piece : pieces) {
      if (piece.empty()) continue;
      if (message.msg_iovlen == kPiecesACall) break;
      vector[message.msg_iovlen++] = {const_cast<std::byte*>(piece.data()), piece.size()};
    }
    if (message.msg_iovlen == 0) return std::size_t{0};
    message.msg_iov = vector.data();
    return moving(what, [&] { return call(message); });
  }
  /// Makes one system call. The rest of a large transfer follows with the next poll, so that no
  /// link starves the others.
  template <class Call>
  Result<std::size_t> moving(const char* what, Call call) {
    if (mark_.forked())
      return Status(Code::aborted, "a forked child cannot use its parent's connections");
    if (!failure_) return failure_;
    ssize_t moved;
    do {
      moved = call();
    } while (moved < 0 && errno == EINTR);
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS))
      return std::size_t{0};
    if (moved < 0) failure_ = Status(Code::network, what + peer_ + ": " + errno_text(errno));
    if (!failure_) return failure_;
    return static_cast<std::size_t>(moved);
  }

  GuardedDescriptor socket_;
  std::string peer_;
  Status failure_;
  ProcessMark mark_;
};

}  // namespace

std::unique_ptr<ByteStream> make_tcp_stream(GuardedDescriptor socket) {
  return std::make_unique<TcpStream>(std::move(socket));
}

}  // namespace muster::transport
