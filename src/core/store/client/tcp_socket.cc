// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/client/tcp_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

namespace muster::store {

/// A kernel that lacks one of these options is slower to notice a lost peer, and no more.
void tune_tcp(int socket) {
  const int on = 1, idle = 10, interval = 5, count = 4, user_timeout = 30000;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof user_timeout);
}

namespace {

std::string local_name(const std::string& host, std::uint16_t port) {
  return "muster-store-" + std::to_string(::geteuid()) + "-" + host + ":" + std::to_string(port);
}

}  // namespace

std::string local_name_of(const SocketAddress& address) {
  const std::string host = address.host();
  return host == "::" || host == "0.0.0.0" ? local_name_of(address.port())
                                           : local_name(host, address.port());
}

std::string local_name_of(std::uint16_t port) { return local_name("*", port); }

}  // namespace muster::store
