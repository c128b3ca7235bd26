#include "muster/transport/tcp_stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "muster/base/socket_address.h"

namespace muster::transport {
namespace {

constexpr std::size_t kPiecesACall = 64;

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
    return transfer(pieces, "sending to ",
                    [this](msghdr& message) { return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    return transfer(pieces, "receiving from ", [this](msghdr& message) {
      const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      if (got == 0) failure_ = Status(Code::closed, peer_ + " has closed its connection");
      return got;
    });
  }
  int descriptor() const override { return socket_.get(); }
  const char* kind() const override { return "tcp"; }

 private:
  /// One system call. More of a large transfer comes with the next poll, so that no link starves the others.
  template <class Bytes, class Call>
  Result<std::size_t> transfer(std::span<const Bytes> pieces, const char* what, Call call) {
    if (mark_.forked()) return Status(Code::aborted, "a forked child cannot use its parent's connections");
    if (!failure_) return failure_;
    std::array<iovec, kPiecesACall> vector;
    msghdr message{};
    for (const Bytes& piece : pieces) {
      if (piece.empty()) continue;
      if (message.msg_iovlen == kPiecesACall) break;
      vector[message.msg_iovlen++] = {const_cast<std::byte*>(piece.data()), piece.size()};
    }
    if (message.msg_iovlen == 0) return std::size_t{0};
    message.msg_iov = vector.data();
    ssize_t moved;
    do {
      moved = call(message);
    } while (moved < 0 && errno == EINTR);
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) return std::size_t{0};
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

std::unique_ptr<ByteStream> make_tcp_stream(GuardedDescriptor socket) { return std::make_unique<TcpStream>(std::move(socket)); }

}  // namespace muster::transport
