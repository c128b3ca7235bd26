// SPDX-License-Identifier: BSD-3-Clause
/// A bare connection to a listener, for peers that break the protocol: it can stay silent, send any
/// bytes, and be torn down at any point.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/security/handshake.h"
#include "core/security/tls_session.h"
#include "muster/clock.h"
#include "testing/limits.h"

namespace muster::testing {

inline SocketAddress loopback_address(std::uint16_t port) {
  return *SocketAddress::numeric("127.0.0.1", port);
}

/// The address of an abstract Unix socket.
inline SocketAddress abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof address.sun_path - 1));
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address),
                       static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size()));
}

/// A connected socket; blocks while the backlog is full.
inline Descriptor dial(const SocketAddress& address) {
  Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_TRUE(socket) << errno_text(errno);
  EXPECT_EQ(::connect(socket.get(), address.raw(), address.length()), 0)
      << address.text() << ": " << errno_text(errno);
  return socket;
}

class RawPeer {
 public:
  static constexpr Duration kLong = muster::testing::kMustHappen;

  /// Connects; blocks while the backlog is full.
  explicit RawPeer(const SocketAddress& address) : socket_(dial(address)) {
    const int flags = ::fcntl(socket_.get(), F_GETFL);
    ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  }
  explicit RawPeer(std::uint16_t port) : RawPeer(loopback_address(port)) {}

  /// Encrypted once it has been let in over TCP; so is what it reads with `read` and `read_some`.
  bool send(std::string_view bytes) {
    if (!tls_) return send_plain(bytes);
    while (!bytes.empty()) {
      const ConstBytes piece = as_bytes(bytes);
      const auto taken = tls_->write({&piece, 1});
      if (!taken.ok()) return false;
      bytes.remove_prefix(*taken);
      if (!send_plain(tls_->take_output())) return false;
    }
    return true;
  }
  bool send_plain(std::string_view bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  /// Waits for the first byte and returns what has arrived, at most `most` bytes. Empty at the end
  /// of the stream or at the limit.
  std::string read_some(std::size_t most = 4096, Duration limit = kLong) {
    if (!tls_) return read_plain(most, limit);
    for (;;) {
      std::string some(most, '\0');
      const MutableBytes piece(reinterpret_cast<std::byte*>(some.data()), most);
      const auto got = tls_->read({&piece, 1});
      some.resize(got.ok() ? *got : 0);
      if (!some.empty() || !got.ok()) return some;
      const std::string bytes = read_plain(4096, limit);
      if (bytes.empty()) return bytes;
      tls_->feed(as_bytes(bytes));
    }
  }
  std::string read_plain(std::size_t most, Duration limit = kLong) {
    std::string some(most, '\0');
    pollfd waiting{socket_.get(), POLLIN, 0};
    const TimePoint now = steady_clock().now();
    const ssize_t n = ::poll(&waiting, 1, poll_milliseconds(now, now + limit)) <= 0
                          ? 0
                          : ::recv(socket_.get(), some.data(), most, 0);
    some.resize(static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    return some;
  }
  /// `count` bytes, fewer where the stream ends before.
  std::string read(std::size_t count) {
    std::string all;
    while (all.size() < count) {
      const std::string some = read_some(count - all.size());
      if (some.empty()) break;
      all += some;
    }
    return all;
  }
  /// Everything until the other side closes; nothing if it has not within `limit`.
  std::optional<std::string> read_to_end(Duration limit = kLong) {
    std::string all;
    char piece[4096];
    const TimePoint deadline = steady_clock().now() + limit;
    for (;;) {
      pollfd waiting{socket_.get(), POLLIN, 0};
      const int left = poll_milliseconds(steady_clock().now(), deadline);
      if (left == 0 || ::poll(&waiting, 1, left) <= 0) return std::nullopt;
      const ssize_t n = ::recv(socket_.get(), piece, sizeof piece, 0);
      if (n <= 0) return all;
      all.append(piece, static_cast<std::size_t>(n));
    }
  }
  /// Goes through the greeting of a TCP connection as a connector; true if it was let in.
  bool authenticate(const Secret& secret, const Handshake::Hello& hello) {
    TlsSession session(TlsSession::Side::connector, hello, secret);
    for (;;) {
      if (const std::string out = session.take_output(); !out.empty() && !send_plain(out))
        return false;
      if (session.failed()) return false;
      if (session.done()) break;
      const std::string bytes = read_plain(4096);
      if (bytes.empty()) return false;
      session.feed(as_bytes(bytes));
    }
    tls_.emplace(std::move(session));
    return true;
  }
  /// Closes with a reset instead of an end.
  void reset() {
    const linger at_once{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    socket_.reset();
  }
  int descriptor() const { return socket_.get(); }

 private:
  Descriptor socket_;
  std::optional<TlsSession> tls_;
};

/// A greeting as a peer without the secret of `hello`'s job may send it: noise, cut or damaged
/// greetings, more than a greeting, nothing.
inline std::string malformed_greeting(std::mt19937_64& random, const Handshake::Hello& hello) {
  TlsSession guess(TlsSession::Side::connector, hello,
                   Secret::given("guess number " + std::to_string(random())));
  std::string bytes = guess.take_output();
  const std::string noise = [&] {
    std::string some(1 + random() % 400, '\0');
    for (char& each : some) each = static_cast<char>(random());
    return some;
  }();
  switch (random() % 6) {
    case 0: return noise;
    case 1: return bytes.substr(0, random() % bytes.size());
    case 2: bytes[random() % bytes.size()] = static_cast<char>(random()); return bytes + noise;
    case 3: return bytes + noise;
    case 4: return "GET / HTTP/1.1\r\nHost: " + std::to_string(random()) + "\r\n\r\n";
    default: return "";
  }
}

/// Connects, sends such a greeting, and closes or resets the connection.
inline void pester(const SocketAddress& address, std::mt19937_64& random,
                   const Handshake::Hello& hello) {
  RawPeer peer(address);
  const std::string bytes = malformed_greeting(random, hello);
  if (!bytes.empty()) peer.send(bytes);  // may be refused while it is being sent
  if (random() % 3 == 0) peer.reset();
}

}  // namespace muster::testing
