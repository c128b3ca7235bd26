// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/scrape_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <exception>
#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/security/secret.h"
#include "faces/cli/loopback_host.h"
#include "muster/clock.h"

namespace muster::cli {
namespace {

constexpr std::size_t kMostPeers = 128;        // limit: descriptors
constexpr std::size_t kLongestRequest = 8192;  // limit: memory of a peer
constexpr Duration kBetweenLooks = std::chrono::seconds(1);
constexpr int kIdleShare = 9;  // of the time that a look takes, at least before the next
constexpr int kBacklog = 64;   // limit: peers that wait
// Of the limit for a step of an answer: peers that say nothing make room before Prometheus, whose
// limit is 10 s, gives up.
constexpr int kRequestShare = 5;
constexpr int kSlowestRead = 12;  // limits for a whole answer

struct ScrapeRequest {
  std::string_view method, path, authorization;
  bool from_foreign_page = false;  // it names another host than the loopback interface's
};

bool is_named(std::string_view name, std::string_view expected) {
  return std::equal(name.begin(), name.end(), expected.begin(), expected.end(),
                    [](unsigned char a, unsigned char b) { return std::tolower(a) == b; });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

/// Parses a head that ends with an empty line; its method is empty if it is none of HTTP.
ScrapeRequest parse_head(std::string_view head) {
  const auto take_line = [&head] {
    const std::size_t end = std::min(head.find("\r\n"), head.size());
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(std::min(end + 2, head.size()));
    return line;
  };
  const std::string_view first = take_line();
  const std::size_t path = first.find(' '), version = first.rfind(' ');
  if (path == std::string_view::npos || version == path ||
      !first.substr(version + 1).starts_with("HTTP/1."))
    return {};
  ScrapeRequest request{.method = first.substr(0, path),
                        .path = first.substr(path + 1, version - path - 1),
                        .authorization = {},
                        .from_foreign_page = false};
  request.path = request.path.substr(0, request.path.find('?'));
  for (std::string_view line = take_line(); !line.empty(); line = take_line()) {
    const std::size_t colon = std::min(line.find(':'), line.size());
    if (colon < line.size() && is_named(line.substr(0, colon), "authorization"))
      request.authorization = trimmed(line.substr(colon + 1));
    if (colon < line.size() && is_named(line.substr(0, colon), "host"))
      request.from_foreign_page |= !is_loopback_host(trimmed(line.substr(colon + 1)));
  }
  return request;
}

std::string answer_of(std::string_view status, const std::string& body, bool with_body = true,
                      std::string_view more = {},
                      std::string_view type = "text/plain; charset=utf-8") {
  std::string text = "HTTP/1.1 ";
  text.append(status).append("\r\nContent-Type: ").append(type).append("\r\nContent-Length: ");
  text.append(std::to_string(body.size())).append("\r\nCache-Control: no-store\r\n");
  text.append(more).append("Connection: close\r\n\r\n");
  return with_body ? text + body : text;
}

struct ScrapePeer {
  Descriptor socket;
  TimePoint deadline;
  TimePoint last = TimePoint::max();  // of the answer, however steadily it is read
  std::string in{}, out{};            // an empty `out`: the request is not whole
  std::size_t sent = 0;               // of `out`
};

/// The loop of the server's thread.
class ScrapeLoop {
 public:
  ScrapeLoop(Descriptor listener, int wakeup, const std::string& token, ScrapedPage page,
             Duration limit)
      : listener_(std::move(listener)),
        wakeup_(wakeup),
        limit_(limit),
        expected_(token.empty() ? std::string() : "Bearer " + token),
        page_(std::move(page)) {}

  void run() {
    for (;;) {
      std::vector<pollfd> watched{{wakeup_, POLLIN, 0},
                                  {takes_peers() ? listener_.get() : -1, POLLIN, 0}};
      for (const ScrapePeer& peer : peers_) {
        const short events = peer.out.empty() ? POLLIN : POLLOUT;
        watched.push_back({peer.socket.get(), events, 0});
      }
      if (::poll(watched.data(), watched.size(), poll_milliseconds(steady_clock().now(), next())) <
          0)
        continue;  // EINTR, or no memory
      if (watched[0].revents != 0) return;
      const std::size_t known = peers_.size();
      for (std::size_t at = 0; at < known; ++at)
        if (watched[at + 2].revents != 0) serve(peers_[at]);
      if (watched[1].revents != 0) accept_peers();
      const TimePoint now = steady_clock().now();
      std::erase_if(peers_,
                    [now](const ScrapePeer& peer) { return !peer.socket || peer.deadline <= now; });
      if (now < next_look_) continue;
      guarded([this] { page_.each_second(); });
      const Duration took = steady_clock().now() - now;
      next_look_ = steady_clock().now() + std::max(kBetweenLooks, kIdleShare * took);
      full_ = false;
    }
  }

 private:
  bool takes_peers() const { return !full_ && peers_.size() < kMostPeers; }

  /// An exception of the page's owner (a folder that cannot be read, no memory) ends no launcher.
  bool guarded(const std::function<void()>& work) {
    try {
      work();
      complained_ = false;
      return true;
    } catch (const std::exception& error) {
      if (!std::exchange(complained_, true))
        log(LogLevel::warning, std::string("the page of metrics cannot be made: ") + error.what());
      return false;
    }
  }

  TimePoint next() const {
    TimePoint until = next_look_;
    for (const ScrapePeer& peer : peers_) until = std::min(until, peer.deadline);
    return until;
  }

  void accept_peers() {
    while (takes_peers()) {
      Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        full_ = lacks_room(errno);  // until the next look
        if (errno == ECONNABORTED || errno == EINTR) continue;
        return;
      }
      peers_.push_back({std::move(socket), deadline_after(steady_clock(), limit_ / kRequestShare)});
    }
  }

  void serve(ScrapePeer& peer) {
    if (peer.out.empty()) read_request(peer);
    if (!peer.out.empty()) send_answer(peer);
  }

  void read_request(ScrapePeer& peer) {
    char bytes[2048];
    const ssize_t count = ::recv(peer.socket.get(), bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count <= 0) return peer.socket.reset();
    peer.in.append(bytes, static_cast<std::size_t>(count));
    const std::size_t end = peer.in.find("\r\n\r\n");
    if (end == std::string::npos && peer.in.size() < kLongestRequest) return;
    peer.out = end == std::string::npos || end > kLongestRequest
                   ? answer_of("431 Request Header Fields Too Large", "the request is too long\n")
                   : answer(parse_head(std::string_view(peer.in).substr(0, end + 4)));
    peer.deadline = deadline_after(steady_clock(), limit_);
    peer.last = deadline_after(steady_clock(), kSlowestRead * limit_);
  }

  void send_answer(ScrapePeer& peer) {
    const std::string_view left = std::string_view(peer.out).substr(peer.sent);
    const ssize_t sent = ::send(peer.socket.get(), left.data(), left.size(), MSG_NOSIGNAL);
    if (sent < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (sent > 0) {
      peer.sent += static_cast<std::size_t>(sent);
      peer.deadline = std::min(deadline_after(steady_clock(), limit_), peer.last);
    }
    if (sent > 0 && peer.sent < peer.out.size()) return;
    // Closing with unread bytes would reset the connection, and with it the answer.
    ::shutdown(peer.socket.get(), SHUT_WR);
    char rest[2048];
    for (int reads = 0; reads < 8 && ::recv(peer.socket.get(), rest, sizeof rest, 0) > 0; ++reads) {
    }
    peer.socket.reset();
  }

  std::string answer(const ScrapeRequest& request) {
    if (request.method.empty()) return answer_of("400 Bad Request", "this is not HTTP/1.1\n");
    const bool head = request.method == "HEAD";
    if (expected_.empty() && request.from_foreign_page)
      return answer_of("421 Misdirected Request",
                       "without a token this is served to 127.0.0.1, localhost and [::1] alone\n",
                       !head);
    if (!is_allowed(request.authorization))
      return answer_of("401 Unauthorized",
                       "this needs the job's token: `muster secret --metrics` prints it\n", !head,
                       "WWW-Authenticate: Bearer realm=\"muster\"\r\n");
    if (!head && request.method != "GET")
      return answer_of("405 Method Not Allowed", "only GET is served\n", true,
                       "Allow: GET, HEAD\r\n");
    if (request.path != "/metrics")
      return answer_of("404 Not Found", "only /metrics is served\n", !head);
    std::string text;
    if (!guarded([&] { text = page_.text(); }))
      return answer_of("500 Internal Server Error", "the launcher's log says why\n", !head);
    return answer_of("200 OK", text, !head, {}, "text/plain; version=0.0.4; charset=utf-8");
  }

  bool is_allowed(std::string_view given) const {
    if (expected_.empty()) return true;
    return equal_in_constant_time(std::as_bytes(std::span(given)),
                                  std::as_bytes(std::span(expected_)));
  }

  const Descriptor listener_;
  const int wakeup_;
  const Duration limit_;
  const std::string expected_;
  const ScrapedPage page_;
  std::vector<ScrapePeer> peers_;
  TimePoint next_look_ = steady_clock().now();
  bool full_ = false;        // no descriptor for another peer
  bool complained_ = false;  // of what the page's owner threw last
};

}  // namespace

Result<std::unique_ptr<ScrapeServer>> ScrapeServer::start(const SocketAddress& address,
                                                          const std::string& token,
                                                          ScrapedPage page, Duration limit) {
  const bool all = address.host() == "::";  // IPv4 too, as people expect
  auto listener = listen_on(address, kBacklog, all);
  if (!listener) return listener.status();
  const auto local = SocketAddress::local_of(listener->get());
  if (!local) return local.status();
  std::unique_ptr<ScrapeServer> server(new ScrapeServer);
  server->address_ = *local;
  server->wakeup_.reset(::eventfd(0, EFD_CLOEXEC));
  if (!server->wakeup_) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  const auto loop = std::make_shared<ScrapeLoop>(std::move(*listener), server->wakeup_.get(), token,
                                                 std::move(page), limit);
  auto thread = start_thread("the thread that serves the metrics", [loop] { loop->run(); });
  if (!thread) return thread.status();
  server->thread_ = std::move(*thread);
  return server;
}

ScrapeServer::~ScrapeServer() {
  const std::uint64_t one = 1;
  // The first word in an empty count always has room.
  [[maybe_unused]] const ssize_t written = ::write(wakeup_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

std::string ScrapeServer::url() const { return "http://" + address_.text() + "/metrics"; }

}  // namespace muster::cli
