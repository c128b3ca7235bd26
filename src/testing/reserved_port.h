// SPDX-License-Identifier: BSD-3-Clause
/// A port for tests whose address must be known before anybody listens there.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"

namespace muster::testing {

/// A port that is free on 127.0.0.1 and ::1, kept for the caller until this process ends. Sockets
/// that are bound and do not listen hold it: the system gives it to no other socket, neither for
/// port 0 nor for an outgoing connection, but a server that asks for it by number (with
/// SO_REUSEADDR, as every server does) gets it. Connections are refused until a server listens.
inline std::uint16_t reserve_port() {
  static std::mutex lock;
  static std::vector<Descriptor> held;
  const std::lock_guard guard(lock);
  const auto bound = [](const char* host, std::uint16_t port) {
    const SocketAddress address = *SocketAddress::numeric(host, port);
    Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (socket && ::bind(socket.get(), address.raw(), address.length()) != 0) socket.reset();
    return socket;
  };
  for (int attempt = 0; attempt < 100; ++attempt) {
    Descriptor four = bound("127.0.0.1", 0);
    if (!four) continue;
    const std::uint16_t port = SocketAddress::local_of(four.get())->port();
    Descriptor six = bound("::1", port);
    if (!six && bound("::1", 0)) continue;  // taken there; a host without IPv6 needs none
    held.push_back(std::move(four));
    if (six) held.push_back(std::move(six));
    return port;
  }
  ADD_FAILURE() << "no port is free";
  return 0;
}

}  // namespace muster::testing
