// SPDX-License-Identifier: BSD-3-Clause
/// For tests: a client that sends what it is told to a server of HTTP, and reads to the end.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <string>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "testing/limits.h"

namespace muster::cli::testing {

using muster::testing::kMustHappen;

class HttpPeer {
 public:
  /// Connects to http://ADDRESS:PORT/...
  explicit HttpPeer(const std::string& url) {
    const std::size_t begin = url.find("//") + 2, end = url.find('/', begin),
                      colon = url.rfind(':', end);
    const auto port = static_cast<std::uint16_t>(std::stoi(url.substr(colon + 1)));
    const auto address = SocketAddress::numeric(url.substr(begin, colon - begin), port);
    EXPECT_TRUE(address.ok()) << url;
    socket_.reset(::socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval limit{kMustHappen.count(), 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    EXPECT_EQ(::connect(socket_.get(), address->raw(), address->length()), 0) << url;
  }
  void send(const std::string& text) {
    if (text.empty()) return;
    const ssize_t sent = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(sent == static_cast<ssize_t>(text.size()) || has_gone()) << errno_text(errno);
  }
  std::string read_to_end() {
    std::string all(1 << 16, '\0');
    std::string text;
    for (;;) {
      const ssize_t count = ::recv(socket_.get(), all.data(), all.size(), 0);
      EXPECT_TRUE(count >= 0 || has_gone()) << errno_text(errno);
      if (count <= 0) return text;
      text.append(all.data(), static_cast<std::size_t>(count));
    }
  }

 private:
  /// The server has closed the connection.
  static bool has_gone() { return errno == EPIPE || errno == ECONNRESET; }

  Descriptor socket_;
};

/// The body of the page at a URL; `more`: lines of the request's head.
inline std::string fetch_page(const std::string& url, const std::string& more = {}) {
  HttpPeer peer(url);
  peer.send("GET " + url.substr(url.find('/', 8)) + " HTTP/1.1\r\n" + more + "\r\n");
  const std::string answer = peer.read_to_end();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200")) << answer;
  const std::size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? answer : answer.substr(body + 4);
}

}  // namespace muster::cli::testing
