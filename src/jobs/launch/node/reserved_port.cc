#include "jobs/launch/node/reserved_port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "core/net/socket_address.h"

namespace muster::launch {
namespace {

constexpr int kAttempts = 100;

Descriptor bound(const char* host, std::uint16_t port) {
  const auto address = SocketAddress::numeric(host, port);
  if (!address) return {};
  Descriptor socket(::socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!socket) return {};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->family() == AF_INET6)
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(socket.get(), address->raw(), address->length()) != 0) return {};
  return socket;
}

}  // namespace

Result<ReservedPort> ReservedPort::take() {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    ReservedPort port;
    port.four_ = bound("0.0.0.0", 0);
    if (!port.four_)
      return Status(Code::network,
                    "no port is free for the program's ranks to meet at: " + errno_text(errno));
    const auto address = SocketAddress::local_of(port.four_.get());
    if (!address) return address.status();
    port.number_ = address->port();
    port.six_ = bound("::", port.number_);
    if (port.six_ || !bound("::", 0)) return port;
  }
  return Status(Code::exhausted,
                "no port is free on both IPv4 and IPv6 for the program's ranks to meet at");
}

}  // namespace muster::launch
