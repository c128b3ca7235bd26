// SPDX-License-Identifier: BSD-3-Clause
/// A man in the middle of TCP connections: passes on what comes, or what a test makes of it.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "testing/raw_peer.h"

namespace muster::testing {

class Relay {
 public:
  /// Returns the bytes to pass on in place of `bytes`. `before` bytes have come before them on this
  /// connection in this direction (0: from the connecting side). Runs on the relay's thread.
  using Tamper = std::function<std::string(int direction, std::size_t before, std::string bytes)>;

  /// Connections to `address()` lead to `target`. `at`: where it listens.
  /// `cuts`: ends a connection in place of passing on what comes.
  Relay(
      const SocketAddress& target, Tamper tamper, const SocketAddress& at = loopback_address(0),
      std::function<bool()> cuts = [] { return false; })
      : target_(target),
        tamper_(std::move(tamper)),
        cuts_(std::move(cuts)),
        stop_(::eventfd(0, EFD_CLOEXEC)) {
    auto listener = listen_on(at, 64);
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(*listener);
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(stop_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    thread_.join();
  }
  Relay(const Relay&) = delete;

  SocketAddress address() const { return *SocketAddress::local_of(listener_.get()); }

 private:
  struct Connection {
    std::array<Descriptor, 2> ends;  // who connects, and the target
    std::array<std::size_t, 2> passed{};
  };

  void run() {
    for (;;) {
      std::vector<pollfd> waits{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Connection& each : connections_)
        for (const Descriptor& end : each.ends) waits.push_back({end.get(), POLLIN, 0});
      ::poll(waits.data(), static_cast<nfds_t>(waits.size()), -1);
      if (waits[0].revents != 0) return;
      std::vector<Connection> go_on;
      for (std::size_t i = 0; i < connections_.size(); ++i) {
        bool open = true;
        for (int way = 0; way < 2 && open; ++way) {
          if (waits[2 + 2 * i + static_cast<std::size_t>(way)].revents != 0)
            open = pass(connections_[i], way);
        }
        if (open) go_on.push_back(std::move(connections_[i]));
      }
      connections_ = std::move(go_on);
      if (waits[1].revents == 0) continue;
      Descriptor from(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (from) connections_.push_back({{std::move(from), dial(target_)}, {}});
    }
  }

  /// False where the connection has ended.
  bool pass(Connection& connection, int way) {
    const auto at = static_cast<std::size_t>(way);
    std::string bytes(64 * 1024, '\0');
    const ssize_t got = ::recv(connection.ends[at].get(), bytes.data(), bytes.size(), 0);
    if (got <= 0 || cuts_()) return false;
    bytes.resize(static_cast<std::size_t>(got));
    const std::string out = tamper_(way, connection.passed[at], bytes);
    connection.passed[at] += bytes.size();
    for (std::size_t sent = 0; sent < out.size();) {
      const ssize_t n =
          ::send(connection.ends[1 - at].get(), out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += static_cast<std::size_t>(n);
    }
    return true;
  }

  const SocketAddress target_;
  const Tamper tamper_;
  const std::function<bool()> cuts_;
  Descriptor stop_, listener_;
  std::vector<Connection> connections_;
  std::thread thread_;
};

/// Changes the byte that comes as number `at` in `direction`.
inline Relay::Tamper flip(int direction, std::size_t at) {
  return [=](int way, std::size_t before, std::string bytes) {
    if (way == direction && at >= before && at - before < bytes.size())
      bytes[at - before] = static_cast<char>(bytes[at - before] ^ 1);
    return bytes;
  };
}

}  // namespace muster::testing
