// SPDX-License-Identifier: BSD-3-Clause
/// Serves one page, /metrics, over HTTP/1.1 to programs that fetch it again and again. One thread
/// answers; it also calls a function of the page's owner once a second, or as often as a tenth of
/// the time allows. Test it alone with a page of a few words: `ctest -R ScrapeServer`.
///
/// A peer may send one request of at most 8 KiB within 1 s, and may stop for 5 s while it takes the
/// answer, which it has within 60 s. 128 peers are served at once; the others wait in the listening
/// socket. An exception of the page's functions is logged, and answered by 500. Answers are plain
/// text: a token proves who asks, and hides nothing from those who can read the network.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

struct ScrapedPage {
  std::function<std::string()> text;
  std::function<void()> each_second;
};

class ScrapeServer {
 public:
  /// Listens at `address`; port 0 takes a free one, and [::] is IPv4 too. A peer must send
  /// `Authorization: Bearer <token>`; if `token` is empty, only those who ask the loopback
  /// interface by its own names are answered, so that no foreign page can read this one. The page's
  /// functions are called on the server's thread. A peer has a fifth of `limit` to send its
  /// request, and `limit` to take more of the answer.
  static Result<std::unique_ptr<ScrapeServer>> start(const SocketAddress& address,
                                                     const std::string& token, ScrapedPage page,
                                                     Duration limit = std::chrono::seconds(5));
  ~ScrapeServer();
  ScrapeServer(const ScrapeServer&) = delete;

  std::string url() const;

 private:
  ScrapeServer() = default;

  SocketAddress address_;
  Descriptor wakeup_;  // an eventfd: the server is to end
  std::thread thread_;
};

}  // namespace muster::cli
