// SPDX-License-Identifier: BSD-3-Clause
/// Serves one page and what it asks for (`/api/...`) over HTTP/1.1, on the loopback interface.
///
/// Any user of the host can connect, so what is under /api needs a token, which the page finds in
/// the fragment of its address: browsers send that to no server, in no referer. Requests that name
/// another host than the loopback interface's (a foreign page that has had its name resolved to
/// 127.0.0.1) are refused. The page may load nothing from elsewhere and run no script but its own
/// (Content-Security-Policy with a nonce).
///
/// A peer sends one request of at most 16 KiB within `limit`, and may stop for as long while it
/// takes the answer, which it has within six limits. 32 peers are served at once; while more come,
/// those that have said least for longest are dropped, so that silent ones hold up nobody.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

struct DashQuery {
  std::string path;  ///< "/api/state"
  std::map<std::string, std::string> parameters;
};

struct DashReply {
  int status = 200;
  std::string body;  ///< JSON
};

struct DashServerOptions {
  std::uint16_t port = 0;  ///< 0 takes a free one
  std::string token;
  std::string page;  ///< each "{{nonce}}" becomes the nonce of its scripts and styles
  /// Called on several threads at once. An exception is answered by 500.
  std::function<DashReply(const DashQuery&)> reply;
  Duration limit = std::chrono::seconds(10);
};

class DashServer {
 public:
  /// Code::unsupported if this build has no HTTP library.
  static Result<std::unique_ptr<DashServer>> start(DashServerOptions options);
  ~DashServer();
  DashServer(const DashServer&) = delete;

  /// "http://127.0.0.1:8080/", without the token.
  const std::string& url() const { return url_; }
  /// Returns when no more peers can be accepted.
  void wait();

 private:
  class PageListener;
  DashServer();

  std::unique_ptr<PageListener> listener_;
  std::string url_;
};

}  // namespace muster::cli
