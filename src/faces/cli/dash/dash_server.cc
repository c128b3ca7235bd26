// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/dash_server.h"

#include "faces/cli/dash/bounded_http.h"

#if MUSTER_HTTPLIB
#include <exception>
#include <span>
#include <thread>
#include <utility>

#include "core/base/threads/thread_start.h"
#include "core/security/secret.h"
#include "faces/cli/loopback_host.h"
#endif

namespace muster::cli {

#if MUSTER_HTTPLIB

namespace {

using Handled = httplib::Server::HandlerResponse;

void put_text(httplib::Response& response, int status, const std::string& text) {
  response.status = status;
  response.set_content(text + "\n", "text/plain; charset=utf-8");
}

std::string with_nonce(std::string page, const std::string& nonce) {
  static const std::string mark = "{{nonce}}";
  for (std::size_t at = page.find(mark); at != std::string::npos; at = page.find(mark, at))
    page.replace(at, mark.size(), nonce);
  return page;
}

/// The rules that a browser keeps, whatever the page shows.
void put_headers(httplib::Response& response, const std::string& nonce) {
  response.set_header("Content-Security-Policy",
                      "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" +
                          nonce +
                          "'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                          "frame-ancestors 'none'");
  response.set_header("Referrer-Policy", "no-referrer");
  response.set_header("X-Content-Type-Options", "nosniff");
  response.set_header("Cross-Origin-Resource-Policy", "same-origin");
  response.set_header("Cross-Origin-Opener-Policy", "same-origin");
  response.set_header("Cache-Control", "no-store");
}

/// 128 random bits.
std::string random_nonce() { return Secret::random_text().substr(kSecretPrefix.size(), 32); }

}  // namespace

#endif

class DashServer::PageListener {
 public:
#if MUSTER_HTTPLIB
  explicit PageListener(DashServerOptions options)
      : options_(std::move(options)),
        expected_("Bearer " + options_.token),
        server_(options_.limit) {
    server_.set_pre_routing_handler(
        [this](const httplib::Request& request, httplib::Response& response) {
          answer(request, response);
          return Handled::Handled;
        });
  }

  Result<std::string> start() {
    const auto port = server_.bind(options_.port);
    if (!port) return port.status();
    auto thread = start_thread("the thread that accepts peers of the page",
                               [this] { server_.listen_after_bind(); });
    if (!thread) return thread.status();
    thread_ = std::move(*thread);
    return "http://127.0.0.1:" + std::to_string(*port) + "/";
  }

  void wait() {
    if (thread_.joinable()) thread_.join();
  }

  ~PageListener() {
    server_.end();
    wait();
  }

 private:
  void answer(const httplib::Request& request, httplib::Response& response) const {
    const std::string nonce = random_nonce();
    put_headers(response, nonce);
    if (request.get_header_value_count("Host") != 1 ||
        !is_loopback_host(request.get_header_value("Host")))
      return put_text(response, 421,
                      "this page is served to 127.0.0.1, localhost and [::1] alone; to look at it "
                      "from another machine, forward the port: ssh -L PORT:127.0.0.1:PORT HOST");
    if (request.method != "GET" && request.method != "HEAD") {
      response.set_header("Allow", "GET, HEAD");
      return put_text(response, 405, "only GET is served");
    }
    if (request.path == "/") {
      response.status = 200;
      return response.set_content(with_nonce(options_.page, nonce), "text/html; charset=utf-8");
    }
    if (!request.path.starts_with("/api/")) return put_text(response, 404, "there is no such page");
    if (!shows_token(request)) {
      response.set_header("WWW-Authenticate", "Bearer realm=\"muster dash\"");
      return put_text(response, 401,
                      "this needs the token: open the whole address that muster dash has printed");
    }
    reply(request, response);
  }

  bool shows_token(const httplib::Request& request) const {
    const std::string given = request.get_header_value("Authorization");
    return equal_in_constant_time(std::as_bytes(std::span(given)),
                                  std::as_bytes(std::span(expected_)));
  }

  void reply(const httplib::Request& request, httplib::Response& response) const {
    DashQuery query{request.path, {}};
    for (const auto& [name, value] : request.params) query.parameters.emplace(name, value);
    try {
      const DashReply made = options_.reply(query);
      response.status = made.status;
      response.set_content(made.body, "application/json");
    } catch (const std::exception& error) {  // a folder that cannot be read, no memory
      put_text(response, 500, std::string("this cannot be answered: ") + error.what());
    }
  }

  const DashServerOptions options_;
  const std::string expected_;
  BoundedHttpServer server_;
  std::thread thread_;
#else
  void wait() {}
#endif
};

#if MUSTER_HTTPLIB

Result<std::unique_ptr<DashServer>> DashServer::start(DashServerOptions options) {
  std::unique_ptr<DashServer> server(new DashServer);
  server->listener_ = std::make_unique<PageListener>(std::move(options));
  auto url = server->listener_->start();
  if (!url) return url.status();
  server->url_ = std::move(*url);
  return server;
}

#else

Result<std::unique_ptr<DashServer>> DashServer::start(DashServerOptions) {
  return Status(Code::unsupported,
                "this muster was built without cpp-httplib; install it (Debian's "
                "libcpp-httplib-dev) and build again");
}

#endif

DashServer::DashServer() = default;
DashServer::~DashServer() = default;

void DashServer::wait() { listener_->wait(); }

}  // namespace muster::cli
