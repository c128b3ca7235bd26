// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/dash_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "faces/cli/testing/http_peer.h"

namespace muster::cli::testing {
namespace {

const std::string kPageText = "<script nonce=\"{{nonce}}\">go()</script>";
const std::string kTokenLine = "Authorization: Bearer word\r\n";

class DashServers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (MUSTER_HTTPLIB == 0) GTEST_SKIP() << "built without cpp-httplib";
  }

  static std::unique_ptr<DashServer> serve(
      std::function<DashReply(const DashQuery&)> reply =
          [](const DashQuery& query) {
            return DashReply{200, "\"" + query.path + "\""};
          },
      Duration limit = kMustHappen) {
    auto server = DashServer::start(
        {.port = 0, .token = "word", .page = kPageText, .reply = std::move(reply), .limit = limit});
    EXPECT_TRUE(server.ok()) << server.status().message();
    return std::move(*server);
  }

  static std::string ask(const DashServer& server, const std::string& request) {
    HttpPeer peer(server.url());
    peer.send(request);
    return peer.read_to_end();
  }

  static std::string get_dash(const std::string& path, const std::string& more = kTokenLine,
                              const std::string& host = "localhost") {
    return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n" + more + "\r\n";
  }
};

bool has_part(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The value of a header.
std::string header_of(const std::string& answer, const std::string& name) {
  const std::size_t begin = answer.find("\r\n" + name + ": ");
  if (begin == std::string::npos) return {};
  const std::size_t value = begin + name.size() + 4;
  return answer.substr(value, answer.find("\r\n", value) - value);
}

// spec: V8.page the page is served without a token, has none in it, and may load nothing: scripts
// and styles are its own by a nonce that changes
TEST_F(DashServers, ServesThePage) {
  const auto server = serve();
  const std::string first = ask(*server, get_dash("/", "")), second = ask(*server, get_dash("/"));
  EXPECT_TRUE(first.starts_with("HTTP/1.1 200 ")) << first;
  const std::string policy = header_of(first, "Content-Security-Policy");
  EXPECT_TRUE(policy.starts_with("default-src 'none'; script-src 'nonce-")) << policy;
  EXPECT_TRUE(has_part(policy, "frame-ancestors 'none'")) << policy;
  const std::size_t begin = policy.find("'nonce-") + 7;
  const std::string nonce = policy.substr(begin, policy.find('\'', begin) - begin);
  EXPECT_EQ(nonce.size(), 32u);
  EXPECT_TRUE(first.ends_with("<script nonce=\"" + nonce + "\">go()</script>")) << first;
  EXPECT_FALSE(has_part(second, nonce)) << second;
  EXPECT_FALSE(has_part(first, "word")) << first;
  EXPECT_EQ(header_of(first, "Referrer-Policy"), "no-referrer");
  EXPECT_EQ(header_of(first, "Cache-Control"), "no-store");
}

// spec: V8.page what is asked for gets its path and parameters
TEST_F(DashServers, HandsOnTheQuestion) {
  const auto server = serve([](const DashQuery& query) {
    EXPECT_EQ(query.path, "/api/rank");
    const auto rank = query.parameters.find("rank");
    return DashReply{200, rank == query.parameters.end() ? "none" : rank->second};
  });
  const std::string answer = ask(*server, get_dash("/api/rank?rank=3%20and&x=1"));
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 ")) << answer;
  EXPECT_EQ(header_of(answer, "Content-Type"), "application/json");
  EXPECT_TRUE(answer.ends_with("\r\n\r\n3 and")) << answer;
}

// spec: V8.page no token, a part of it, or another one: refused, whatever is asked for
TEST_F(DashServers, AsksForTheToken) {
  std::atomic<int> asked = 0;
  const auto server = serve([&](const DashQuery&) {
    ++asked;
    return DashReply{};
  });
  for (const std::string& header :
       {std::string(), std::string("Authorization: Bearer wor\r\n"),
        std::string("Authorization: Bearer words\r\n"), std::string("Authorization: word\r\n"),
        std::string("Cookie: token=word\r\n")}) {
    for (const std::string& path : {std::string("/api/state"), std::string("/api/none")}) {
      const std::string answer = ask(*server, get_dash(path, header));
      EXPECT_TRUE(answer.starts_with("HTTP/1.1 401 ")) << header << answer;
    }
  }
  EXPECT_TRUE(ask(*server, get_dash("/api/state?token=word", "")).starts_with("HTTP/1.1 401 "));
  EXPECT_EQ(asked, 0);
}

// spec: V8.page, W7 a page of elsewhere whose name leads here is refused, with and without the
// token
TEST_F(DashServers, RefusesForeignHosts) {
  const auto server = serve();
  for (const std::string host : {"evil.example", "evil.example:80", "127.0.0.1.evil.example",
                                 "localhost.evil", "127.0.0.1:80@evil", "10.0.0.1", ""}) {
    for (const std::string path : {"/", "/api/state"}) {
      const std::string answer = ask(*server, get_dash(path, kTokenLine, host));
      EXPECT_TRUE(answer.starts_with("HTTP/1.1 421 ")) << host << "\n" << answer;
    }
  }
  const std::string twice = get_dash("/", "Host: evil.example\r\n");
  EXPECT_TRUE(ask(*server, twice).starts_with("HTTP/1.1 421 "));
  EXPECT_TRUE(ask(*server, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 421 "));
  for (const std::string host : {"127.0.0.1", "LocalHost:8080", "[::1]:1", "127.0.0.1:65535"})
    EXPECT_TRUE(ask(*server, get_dash("/", "", host)).starts_with("HTTP/1.1 200 ")) << host;
}

// spec: V8.page what is no request for the page is refused by name
TEST_F(DashServers, RefusesOtherRequests) {
  const auto server = serve();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {get_dash("/page.html"), "404"},
      {get_dash("/etc/passwd"), "404"},
      {get_dash("/../../etc/passwd"), "404"},
      {"POST /api/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n" + kTokenLine +
           "\r\nbody",
       "405"},
      {"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", "405"}};
  for (const auto& [request, code] : cases) {
    const std::string answer = ask(*server, request);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + code)) << request << "\n" << answer;
  }
  for (const std::string& request :
       {std::string("\r\n\r\n"), std::string("GET /\r\n\r\n"),
        std::string("\0\xff GET\r\n\r\n", 10), get_dash("/" + std::string(9000, 'x')),
        get_dash("/", "X: " + std::string(20000, 'x') + "\r\n")}) {
    const std::string answer = ask(*server, request);
    EXPECT_FALSE(answer.starts_with("HTTP/1.1 200")) << request.substr(0, 80);
  }
}

// spec: V8.page ranges of a page, which could multiply it, are not served
TEST_F(DashServers, ServesNoRanges) {
  const auto server = serve();
  const std::string answer = ask(*server, get_dash("/", "Range: bytes=0-,0-,0-,0-\r\n"));
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 ")) << answer;
  EXPECT_LT(answer.size(), 2000u);
}

// spec: V8.page, W7 no header that the page does not need is read: the library overflows its stack
// on a long list of ranges, before anybody has shown a token
TEST_F(DashServers, ReadsNoHeaderThatItDoesNotNeed) {
  const auto server = serve();
  std::string ranges = "-";
  while (ranges.size() < 7000) ranges += ",-";
  const std::string header = "Range: bytes=" + ranges + "\r\n";
  EXPECT_TRUE(ask(*server, get_dash("/", header)).starts_with("HTTP/1.1 200 "));
  // Hidden from one who looks for whole lines, and seen by one who divides at line feeds.
  EXPECT_EQ(ask(*server, get_dash("/", kTokenLine, "localhost\n" + header)), "");
  EXPECT_EQ(ask(*server, get_dash("/", "X: 1\n" + header)), "");
  EXPECT_TRUE(ask(*server, get_dash("/api/state")).starts_with("HTTP/1.1 200 "));
}

// spec: V8.stacks an answer that takes longer than a peer has for its request reaches it whole
TEST_F(DashServers, ALateAnswerIsWhole) {
  constexpr std::size_t kBytes = std::size_t{16} << 20;  // more than a socket's buffers
  const Duration limit = std::chrono::seconds(1);
  const auto server = serve(
      [limit](const DashQuery&) {
        std::this_thread::sleep_for(limit + std::chrono::milliseconds(1));  // the fault itself
        return DashReply{200, std::string(kBytes, 'x')};
      },
      limit);
  EXPECT_GE(ask(*server, get_dash("/api/stacks")).size(), kBytes);
}

// spec: V8.page what an answer throws is told and ends nothing
TEST_F(DashServers, OutlivesAnException) {
  const auto server = serve([](const DashQuery& query) -> DashReply {
    if (query.path == "/api/throws") throw std::runtime_error("no such folder");
    return {};
  });
  const std::string answer = ask(*server, get_dash("/api/throws"));
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 500 ")) << answer;
  EXPECT_TRUE(has_part(answer, "no such folder")) << answer;
  EXPECT_TRUE(ask(*server, get_dash("/api/state")).starts_with("HTTP/1.1 200 "));
}

// spec: V8.page hundreds of peers that say nothing, or send their request byte by byte, hold up
// nobody
TEST_F(DashServers, SilentPeersHoldUpNobody) {
  const auto server = serve();  // no limit of time helps
  std::vector<std::unique_ptr<HttpPeer>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<HttpPeer>(server->url()));
    silent.back()->send(i % 2 == 0 ? "" : "GET / HT");
    if (i % 50 != 49) continue;
    const std::string answer = ask(*server, get_dash("/api/state"));
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 ")) << i << answer;
  }
}

// spec: V8.page a peer that never ends its request is dropped at the limit
TEST_F(DashServers, DropsASlowPeerAtTheLimit) {
  const auto server =
      serve([](const DashQuery&) { return DashReply{}; }, std::chrono::milliseconds(50));
  HttpPeer peer(server->url());
  peer.send("GET / HTTP/1.1\r\n");
  EXPECT_FALSE(has_part(peer.read_to_end(), "200"));
}

// spec: V8.page answers that take long hold up no other
TEST_F(DashServers, AnswersSeveralAtOnce) {
  std::promise<void> go;
  const std::shared_future<void> gone = go.get_future().share();
  const auto server = serve([&](const DashQuery& query) {
    if (query.path == "/api/stacks") gone.wait();
    return DashReply{200, "{}"};
  });
  HttpPeer slow(server->url());
  slow.send(get_dash("/api/stacks"));
  EXPECT_TRUE(ask(*server, get_dash("/api/state")).starts_with("HTTP/1.1 200 "));
  go.set_value();
  EXPECT_TRUE(slow.read_to_end().starts_with("HTTP/1.1 200 "));
}

// spec: V8.page a server that goes ends what it serves, also before anybody has come
TEST_F(DashServers, EndsAtOnce) {
  for (int i = 0; i < 20; ++i) serve().reset();
  auto server = serve();
  HttpPeer silent(server->url());
  server.reset();
  EXPECT_EQ(silent.read_to_end(), "");
}

// spec: V8.page, W7 a port that is taken is named, and shared with nobody
TEST_F(DashServers, SharesNoPort) {
  const auto server = serve();
  const std::string url = server->url();
  const auto port = static_cast<std::uint16_t>(std::stoi(url.substr(url.rfind(':') + 1)));
  const auto second = DashServer::start({.port = port, .token = "t", .page = "", .reply = {}});
  EXPECT_FALSE(second.ok());
  EXPECT_TRUE(has_part(second.status().message(), std::to_string(port)));
}

}  // namespace
}  // namespace muster::cli::testing
