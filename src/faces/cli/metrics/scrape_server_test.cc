// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/scrape_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "faces/cli/metrics/metrics.h"
#include "faces/cli/metrics/time_allowance.h"
#include "faces/cli/testing/http_peer.h"

namespace muster::cli::testing {
namespace {

const std::string kScraped = "up 1\n";

/// Waits for peers as long as the test does, unless `limit` says otherwise.
std::unique_ptr<ScrapeServer> server_of(const std::string& token, const ScrapedPage& page,
                                        Duration limit = kMustHappen) {
  auto server = ScrapeServer::start(*SocketAddress::numeric("127.0.0.1", 0), token, page, limit);
  EXPECT_TRUE(server.ok()) << server.status().message();
  return std::move(*server);
}
std::unique_ptr<ScrapeServer> server_of(const std::string& token = {}) {
  return server_of(token, {[] { return kScraped; }, [] {}});
}
std::string get_of(const std::string& path, const std::string& more = {}) {
  return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + more + "\r\n";
}

// spec: V7 the page, with the type of Prometheus's text format
TEST(ScrapeServer, ServesThePage) {
  const auto server = server_of();
  HttpPeer peer(server->url());
  peer.send(get_of("/metrics?x=1"));
  const std::string answer = peer.read_to_end();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_NE(answer.find("Content-Type: text/plain; version=0.0.4"), std::string::npos);
  EXPECT_TRUE(answer.ends_with("\r\n\r\n" + kScraped)) << answer;
}

// spec: V7 what is no request for the page is refused by name
TEST(ScrapeServer, RefusesOtherRequests) {
  const auto server = server_of();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {get_of("/"), "404"},
      {get_of("/metrics/../secret"), "404"},
      {"POST /metrics HTTP/1.1\r\n\r\n", "405"},
      {"\r\n\r\n", "400"},
      {"GET\r\n\r\n", "400"},
      {"GET /metrics\r\n\r\n", "400"},
      {"GET /metrics HTTP/2\r\n\r\n", "400"},
      {std::string("\0\xff GET\r\n\r\n", 10), "400"},
      {get_of("/metrics", "X: " + std::string(9000, 'x') + "\r\n"), "431"}};
  for (const auto& [request, code] : cases) {
    HttpPeer peer(server->url());
    peer.send(request);
    const std::string answer = peer.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + code)) << request << "\n" << answer;
    EXPECT_EQ(answer.find(kScraped), std::string::npos);
  }
  HttpPeer head(server->url());
  head.send("HEAD /metrics HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(head.read_to_end().ends_with("\r\n\r\n"));
}

// spec: V7 a token must be shown whole; W7 and before anything is told
TEST(ScrapeServer, AsksForTheToken) {
  const auto server = server_of("word");
  for (const std::string& header :
       {std::string(), std::string("Authorization: Bearer wor\r\n"),
        std::string("Authorization: Bearer words\r\n"), std::string("Authorization: word\r\n"),
        std::string("Authorization: Bearer wore\r\n")}) {
    for (const std::string path : {"/metrics", "/"}) {
      HttpPeer peer(server->url());
      peer.send(get_of(path, header));
      const std::string answer = peer.read_to_end();
      EXPECT_TRUE(answer.starts_with("HTTP/1.1 401")) << header << answer;
      EXPECT_EQ(answer.find(kScraped), std::string::npos);
    }
  }
  HttpPeer peer(server->url());
  peer.send(get_of("/metrics", "authorization:  Bearer word \r\n"));
  EXPECT_TRUE(peer.read_to_end().ends_with(kScraped));
}

// spec: V7, W7 without a token a page of elsewhere whose name leads here is told nothing
TEST(ScrapeServer, RefusesForeignPages) {
  const auto answer_to = [](const std::string& token, const std::string& host) {
    const auto server = server_of(token);
    HttpPeer peer(server->url());
    peer.send("GET /metrics HTTP/1.1\r\nHost: " + host + "\r\nAuthorization: Bearer word\r\n\r\n");
    return peer.read_to_end();
  };
  for (const std::string host : {"evil.example:80", "127.0.0.1.evil.example", ""}) {
    const std::string answer = answer_to("", host);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 421 ")) << host << answer;
    EXPECT_EQ(answer.find(kScraped), std::string::npos);
  }
  for (const std::string host : {"127.0.0.1:9464", "LOCALHOST", "[::1]:1"})
    EXPECT_TRUE(answer_to("", host).ends_with(kScraped)) << host;
  EXPECT_TRUE(answer_to("word", "node0:9464").ends_with(kScraped));
}

// spec: V7 [::] is every address of this host, IPv4's too
TEST(ScrapeServer, AllAddressesAreOfBothKinds) {
  const auto any = SocketAddress::numeric("::", 0);
  ASSERT_TRUE(any.ok());
  auto server = ScrapeServer::start(*any, "", {[] { return kScraped; }, [] {}}, kMustHappen);
  if (!server.ok()) GTEST_SKIP() << "no IPv6 here: " << server.status().message();
  std::string url = (*server)->url();
  url.replace(url.find("[::]"), 4, "127.0.0.1");
  HttpPeer peer(url);
  peer.send(get_of("/metrics"));
  EXPECT_TRUE(peer.read_to_end().ends_with(kScraped));
}

// spec: V7 those who ask again and again get a tenth of the time, and a scrape now and then all it
// needs
TEST(TimeAllowances, IsATenth) {
  TimeAllowance allowance;
  TimePoint now = steady_clock().now();
  EXPECT_TRUE(allowance.has_any(now));
  allowance.spend(std::chrono::seconds(2));
  EXPECT_FALSE(allowance.has_any(now));
  EXPECT_FALSE(allowance.has_any(now += std::chrono::seconds(9)));
  EXPECT_TRUE(allowance.has_any(now += std::chrono::seconds(2)));
  allowance.spend(std::chrono::milliseconds(200));
  EXPECT_FALSE(allowance.has_any(now));
  EXPECT_TRUE(allowance.has_any(now += std::chrono::hours(1)));
  allowance.spend(std::chrono::milliseconds(1001));  // an hour saves up no more than a second
  EXPECT_FALSE(allowance.has_any(now));
}

// spec: V7 peers that say nothing, or stop in the middle, are let go
TEST(ScrapeServer, SilentPeersAreLetGo) {
  const auto server = server_of({}, {[] { return kScraped; }, [] {}}, std::chrono::milliseconds(1));
  for (const std::string said : {"", "GET /metrics HT"}) {
    HttpPeer peer(server->url());
    peer.send(said);
    EXPECT_EQ(peer.read_to_end(), "");
  }
}

// spec: V7 and while they are waited for, they keep nobody from the page
TEST(ScrapeServer, SilentPeersHoldNobodyUp) {
  const auto server = server_of();
  std::vector<std::unique_ptr<HttpPeer>> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(std::make_unique<HttpPeer>(server->url()));
    silent.back()->send(i % 2 == 0 ? "" : "GET /metrics HT");
  }
  HttpPeer peer(server->url());
  peer.send(get_of("/metrics"));
  EXPECT_TRUE(peer.read_to_end().ends_with(kScraped));
}

// spec: V7 what the page's owner throws is an answer, and the server goes on
TEST(ScrapeServer, AFailureOfTheOwnerIsAnswered) {
  int pages = 0;
  const auto throwing = [&]() -> std::string {
    if (++pages == 1) throw std::runtime_error("no folder");
    return kScraped;
  };
  const auto server = server_of({}, {throwing, [] { throw std::runtime_error("no folder"); }});
  for (const std::string code : {"500", "200"}) {
    HttpPeer peer(server->url());
    peer.send(get_of("/metrics"));
    const std::string answer = peer.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + code)) << answer;
  }
}

// spec: V7 more peers than are served at once wait for those before them, and requests in pieces
// are put together
TEST(ScrapeServer, ManyPeersAreAllServed) {
  const auto server = server_of();
  std::vector<std::unique_ptr<HttpPeer>> peers;
  for (int i = 0; i < 150; ++i) peers.push_back(std::make_unique<HttpPeer>(server->url()));
  const std::string request = get_of("/metrics");
  for (const char letter : request)
    for (const auto& peer : peers) peer->send(std::string(1, letter));
  for (const auto& peer : peers) EXPECT_TRUE(peer->read_to_end().ends_with(kScraped));
}

// spec: V7 a page larger than the socket's buffers arrives whole, and the server ends with a peer
// that takes nothing
TEST(ScrapeServer, LargePagesArriveWhole) {
  const std::string large(32u << 20, 'x');
  auto server = server_of({}, {[&] { return large; }, [] {}});
  HttpPeer slow(server->url()), peer(server->url());
  slow.send(get_of("/metrics"));
  peer.send(get_of("/metrics"));
  const std::string answer = peer.read_to_end();
  EXPECT_TRUE(answer.ends_with("\r\n\r\n" + large)) << answer.size();
  server.reset();
}

// spec: V7 the owner looks without being asked
TEST(ScrapeServer, LooksByItself) {
  std::promise<void> twice;
  int looks = 0;
  const auto server = server_of({}, {[] { return kScraped; },
                                     [&] {
                                       if (++looks == 2) twice.set_value();
                                     }});
  EXPECT_EQ(twice.get_future().wait_for(kMustHappen), std::future_status::ready);
}

// spec: V7 an address that is taken is named
TEST(ScrapeServer, NamesATakenAddress) {
  if (MUSTER_PROMETHEUS == 0) GTEST_SKIP() << "built without prometheus-cpp";
  const auto server = server_of();
  const auto address = parse_metrics_address(server->url().substr(7, server->url().rfind('/') - 7));
  ASSERT_TRUE(address.ok()) << address.status().message();
  const auto second = serve_metrics(*address, std::make_shared<launch::NodeNumbers>());
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("--metrics " + address->text()), std::string::npos)
      << second.status().message();
}

}  // namespace
}  // namespace muster::cli::testing
