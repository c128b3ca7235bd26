// SPDX-License-Identifier: BSD-3-Clause
// Fuzzers of what store/ parses from outside: requests, replies, whole conversations with the
// server and with a server that lies, announcements by multicast, init methods. (Damaged files:
// file_store_test.cc.)

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/rendezvous/rendezvous.h"
#include "core/store/announcement.h"
#include "core/store/factory.h"
#include "core/store/testing/long_wait.h"
#include "core/store/testing/server_bench.h"
#include "testing/fuzz.h"
#include "testing/raw_peer.h"

namespace muster::store {
namespace {

using bench::Bench;
using bench::whole;
using testing::Fuzz;

/// Any operation with any numbers, keys and values: well-formed on the wire, seldom sensible.
std::string any_request(Fuzz& fuzz, std::uint64_t id) {
  constexpr std::int64_t kNumbers[] = {0,
                                       1,
                                       -1,
                                       5,
                                       std::numeric_limits<std::int64_t>::max(),
                                       std::numeric_limits<std::int64_t>::min()};
  constexpr std::string_view kTexts[] = {
      "a",        "b",         "count",         "9223372036854775807", "", "muster/workers",
      "\xff\x00", "j/trace/1", "j/trace/ask/1", "j/trace/answer/i/1"};
  const auto text = [&] { return kTexts[fuzz.below(std::size(kTexts))]; };
  Request request;
  request.op = static_cast<StoreOp>(fuzz.below(kLastOp + 3));
  request.timeout = Duration(fuzz.one_in(3) ? kNumbers[fuzz.below(std::size(kNumbers))]
                                            : static_cast<std::int64_t>(fuzz.below(1000)));
  request.number = fuzz.one_in(4) ? static_cast<std::int64_t>(fuzz.word())
                                  : kNumbers[fuzz.below(std::size(kNumbers))];
  request.index = static_cast<std::int32_t>(fuzz.one_in(8) ? fuzz.word() : fuzz.below(4));
  request.members = static_cast<std::int32_t>(fuzz.one_in(8) ? fuzz.word() : fuzz.below(4));
  for (std::size_t i = fuzz.below(4); i > 0; --i) request.keys.push_back(text());
  for (std::size_t i = fuzz.below(4); i > 0; --i) request.values.push_back(text());
  return whole(request, id);
}

// spec: C7 requests from the wire: what is accepted is what was sent, to the byte
TEST(StoreProtocolFuzz, DecodedRequestsAreThoseThatWereSent) {
  Fuzz fuzz(1);
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const std::string sent = any_request(fuzz, fuzz.word()).substr(4);
    const std::string frame = fuzz.one_in(10)  ? fuzz.noise(200)
                              : fuzz.one_in(4) ? sent
                                               : fuzz.damaged(sent);
    const auto back = decode_request(frame);
    if (!back.ok()) continue;
    EXPECT_EQ(whole(back->request, back->id).substr(4), frame);
  }
}

// spec: C7 replies from the wire: what is accepted is what was sent, to the byte
TEST(StoreProtocolFuzz, DecodedRepliesAreThoseThatWereSent) {
  Fuzz fuzz(2);
  const auto whole_reply = [](const Reply& reply, std::uint64_t id) {
    std::string frame = encode_head(reply, id);
    for (const auto& value : reply.values) frame += *value;
    return frame.substr(4);
  };
  Reply good;
  good.status = Status(Code::timed_out, "a message", {1, 5});
  good.number = -3;
  for (const char* text : {"one", "", "three"})
    good.values.push_back(std::make_shared<const std::string>(text));
  const std::string frame = whole_reply(good, 77);
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const std::string bad = fuzz.one_in(10) ? fuzz.noise(200) : fuzz.damaged(frame);
    const auto back = decode_reply(bad);
    if (back.ok() && !back->reply.status.ok()) {  // a success has no message, whatever came with it
      EXPECT_EQ(whole_reply(back->reply, back->id), bad);
    }
  }
}

// spec: C7 frames cut anywhere come out whole, and a stream that lies costs no more than what has
// come
TEST(StoreProtocolFuzz, StreamsAreCutIntoTheirFrames) {
  Fuzz fuzz(3);
  for (testing::FuzzRun run(500); run.goes_on();) {
    std::string stream;
    std::vector<std::string> frames;
    for (std::size_t i = fuzz.below(6); i > 0; --i) {
      const std::string frame = any_request(fuzz, i);
      frames.push_back(frame.substr(4));
      stream += frame;
    }
    const bool lies = fuzz.one_in(2);
    if (lies) stream = fuzz.damaged(stream);
    RequestFrames reader;
    std::vector<std::string> got;
    for (const auto piece : fuzz.pieces(stream)) {
      reader.feed(as_bytes(piece));
      while (const auto frame = reader.next()) got.emplace_back(*frame);
      EXPECT_LE(reader.held(), 2 * stream.size() + 4096);
    }
    if (!lies) {
      EXPECT_EQ(got, frames);
    }
  }
}

// spec: C2 a client with the secret that sends anything it likes ends its own connection at most;
// the others are served, nothing is held
TEST(StoreServerFuzz, AnythingEndsItsOwnConnectionAtMost) {
  Fuzz fuzz(4);
  Bench bench;
  const auto friendly = bench.authenticated();
  testing::FuzzRun run(1000);
  for (int round = 0; run.goes_on(); ++round) {
    const auto odd = bench.authenticated();
    std::string stream;
    for (std::size_t i = 1 + fuzz.below(5); i > 0; --i) stream += any_request(fuzz, i);
    if (fuzz.one_in(2)) stream = fuzz.damaged(stream);
    for (const auto piece : fuzz.pieces(stream)) {
      if (!bench.closed(odd)) bench.feed(odd, piece);
    }
    if (fuzz.one_in(4)) bench.advance(Duration(fuzz.below(2000)));
    ASSERT_LE(bench.server.held(odd), std::size_t{1} << 16);
    if (!bench.closed(odd)) bench.close(odd);
    bench.feed(friendly, bench::set("alive", std::to_string(round), 1) + bench::get("alive", 2));
    const auto replies = bench.replies(friendly);
    ASSERT_EQ(replies.size(), 2u);
    ASSERT_EQ(*replies[1].reply.values.at(0), std::to_string(round));
  }
  EXPECT_EQ(bench.server.connections(), 1u);
}

// spec: W1 with the observers' key: whatever is asked, nothing is written but questions
TEST(StoreServerFuzz, ObserversWriteNothing) {
  Fuzz fuzz(9);
  Bench bench({.secret = bench::kServerSecret, .job = "job", .observed_job = "looked at"});
  const auto friendly = bench.authenticated();
  bench.feed(friendly, bench::set("a", "1", 1) + bench::set("count", "2", 2) +
                           bench::set("j/trace/1", "word", 3) + bench::set("b", "3", 4));
  bench.replies(friendly);
  const Handshake::Hello hello{
      .role = Handshake::Role::observer, .job = "looked at", .build = kStoreBuild};
  const auto keys = whole({.op = StoreOp::list_keys}, 1);
  const auto state = [&] {
    std::vector<std::string> all;
    bench.feed(friendly, keys + bench::get("a", 2) + bench::get("b", 3) + bench::get("count", 4) +
                             bench::get("j/trace/1", 5));
    for (const auto& reply : bench.replies(friendly))
      for (const auto& value : reply.reply.values) all.push_back(*value);
    return all;
  };
  const auto before = state();
  ASSERT_EQ(before.size(), 5u + 4u);
  for (testing::FuzzRun run(1000); run.goes_on();) {
    const auto odd = bench.authenticated(hello, bench::kServerSecret.observer());
    std::string stream;
    for (std::size_t i = 1 + fuzz.below(8); i > 0; --i) stream += any_request(fuzz, i);
    if (fuzz.one_in(4)) stream = fuzz.damaged(stream);
    for (const auto piece : fuzz.pieces(stream)) {
      if (!bench.closed(odd)) bench.feed(odd, piece);
    }
    if (!bench.closed(odd)) bench.close(odd);
    ASSERT_EQ(state(), before);
  }
}

// spec: C2 unauthenticated peers: a server fed with anything instead of a TLS connection answers at
// most its greeting, an alert or its half of a handshake, and serves nothing
TEST(StoreServerFuzz, OutsidersGetNowhereOverTcp) {
  Fuzz fuzz(6);
  Bench bench;
  const Handshake::Hello hello{.job = "job", .build = kStoreBuild};
  for (testing::FuzzRun run(500); run.goes_on();) {
    const auto outsider = bench.open(Bench::ListenerWay::tcp);
    TlsSession guess(TlsSession::Side::connector, hello, Secret::given("a guess of the secret"));
    std::string bytes = fuzz.one_in(4)   ? fuzz.noise(300)
                        : fuzz.one_in(2) ? guess.take_output() + fuzz.noise(64)
                                         : fuzz.damaged(guess.take_output());
    bytes += bench::set("key", "value", 1);
    for (const auto piece : fuzz.pieces(bytes)) {
      if (!bench.closed(outsider)) bench.feed(outsider, piece);
    }
    EXPECT_LE(bench.take(outsider).size(), 1000u);
    if (!bench.closed(outsider)) bench.close(outsider);
    ASSERT_EQ(bench.server.unauthenticated(), 0u);
  }
  const auto friendly = bench.authenticated();
  bench.feed(friendly, bench::get("key", 1));
  EXPECT_TRUE(bench.replies(friendly).empty());  // nobody has set it
}

// spec: C2 unauthenticated peers: a server fed with anything instead of a greeting answers at most
// its own greeting and one byte
TEST(StoreServerFuzz, OutsidersGetNowhere) {
  Fuzz fuzz(5);
  Bench bench;
  const std::string greeting = Handshake(Handshake::Side::connector,
                                         {.job = "job", .build = kStoreBuild}, bench::kServerSecret)
                                   .take_output();
  for (testing::FuzzRun run(2000); run.goes_on();) {
    const auto outsider = bench.open();
    const std::string bytes =
        fuzz.one_in(4) ? fuzz.noise(300) : fuzz.damaged(greeting) + fuzz.noise(64);
    for (const auto piece : fuzz.pieces(bytes)) {
      if (!bench.closed(outsider)) bench.feed(outsider, piece);
    }
    EXPECT_LE(bench.take(outsider).size(), greeting.size() + 1);
    if (!bench.closed(outsider)) bench.close(outsider);
    ASSERT_EQ(bench.server.unauthenticated(), 0u);
  }
}

/// Takes one connection after another, greets in good order, and answers each request with
/// something damaged before it hangs up.
class LyingServer {
 public:
  explicit LyingServer(std::uint64_t salt)
      : listener_(*listen_on(testing::loopback_address(0), 64)),
        thread_([this, salt] { serve(salt); }) {}
  ~LyingServer() {
    stop_.store(true);
    thread_.join();
  }
  std::uint16_t port() const { return SocketAddress::local_of(listener_.get())->port(); }

 private:
  void serve(std::uint64_t salt) {
    Fuzz fuzz(salt);
    while (!stop_.load()) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 100) != 1) continue;
      const Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      TlsSession session(Handshake::Side::acceptor,
                         {.role = Handshake::Role::store,
                          .job = store_job(port(), "job", Handshake::Role::store),
                          .build = kStoreBuild},
                         bench::kServerSecret);
      std::string input(4096, '\0'), request(4096, '\0');
      const MutableBytes asked(reinterpret_cast<std::byte*>(request.data()), request.size());
      bool came = false;
      while (!session.failed() && !came) {
        const ssize_t got = ::recv(socket.get(), input.data(), input.size(), 0);
        if (got <= 0) break;
        session.feed(as_bytes(std::string_view(input).substr(0, static_cast<std::size_t>(got))));
        send(socket, session.take_output());
        if (!session.done()) continue;
        const auto read = session.read({&asked, 1});
        came = read.ok() && *read > 0;
      }
      if (!came) continue;
      Reply reply;
      reply.values = {std::make_shared<const std::string>("value")};
      const std::string good = encode_head(reply, 1 + fuzz.below(2)) + "value";
      const std::string answer = fuzz.one_in(8)   ? fuzz.noise(200)
                                 : fuzz.one_in(8) ? std::string(fuzz.cut(good))
                                                  : fuzz.damaged(good);
      const ConstBytes piece = as_bytes(answer);
      static_cast<void>(session.write({&piece, 1}).ok());
      send(socket, session.take_output());
    }
  }
  static void send(const Descriptor& socket, const std::string& bytes) {
    static_cast<void>(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }

  Descriptor listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// spec: C7 a server that answers anything: the client gets what it asked for or an error, never
// more
TEST(StoreClientFuzz, AnswersThatLieAreErrors) {
  Fuzz fuzz(7);
  LyingServer server(6);
  TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = server.port();
  options.timeout = kLong;
  options.secret = bench::kServerSecret;
  options.job = "job";
  options.within_host = false;
  const std::vector<std::string> keys = {"a", "b"};
  for (testing::FuzzRun run(300); run.goes_on();) {
    const auto client = make_tcp_store(options);
    ASSERT_TRUE(client.ok()) << client.status().message();
    switch (fuzz.below(5)) {
      case 0: static_cast<void>((*client)->get("key").ok()); break;
      case 1: static_cast<void>((*client)->add("key", 1).ok()); break;
      case 2: {
        const auto values = (*client)->multi_get(keys);
        EXPECT_TRUE(!values.ok() || values->size() == keys.size());
        break;
      }
      case 3: {
        const auto values = (*client)->all_gather("key", 0, 3, "zero");
        EXPECT_TRUE(!values.ok() || values->size() == 3);
        break;
      }
      default: static_cast<void>((*client)->list_keys().ok()); break;
    }
  }
}

// spec: B6 multicast: datagrams that are not this job's are not believed
TEST(AnnouncementFuzz, DamagedDatagramsAreNotBelieved) {
  Fuzz fuzz(8);
  GroupHash group{}, other{};
  other[3] = std::byte{1};
  const Announcement said{.id = 77,
                          .rank = 3,
                          .world_size = 8,
                          .store_port = 29500,
                          .store_host = "2001:db8::17",
                          .count = 5,
                          .heard = {{78, 4}, {79, 1}}};
  const std::string good = encode(said, group, bench::kServerSecret);
  const auto back = decode_announcement(good, group, bench::kServerSecret);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->id, said.id);
  EXPECT_EQ(back->rank, said.rank);
  EXPECT_EQ(back->world_size, said.world_size);
  EXPECT_EQ(back->store_port, said.store_port);
  EXPECT_EQ(back->store_host, said.store_host);
  EXPECT_EQ(back->count, said.count);
  ASSERT_EQ(back->heard.size(), 2u);
  EXPECT_EQ(back->heard[1].id, 79u);
  EXPECT_FALSE(decode_announcement(good, other, bench::kServerSecret));
  EXPECT_FALSE(
      decode_announcement(good, group, Secret::given("another secret, as long as needed")));
  for (std::size_t cut = 0; cut < good.size(); ++cut)
    EXPECT_FALSE(decode_announcement(good.substr(0, cut), group, bench::kServerSecret)) << cut;
  for (testing::FuzzRun run(2000); run.goes_on();) {
    const std::string bad = fuzz.one_in(8) ? fuzz.noise(2 * good.size()) : fuzz.damaged(good);
    EXPECT_EQ(decode_announcement(bad, group, bench::kServerSecret).has_value(), bad == good);
  }
}

// spec: B3 B5 malformed init methods are refused in words that show them
TEST(InitUrlFuzz, TextsAreReadOrRefusedWhole) {
  Fuzz fuzz(9);
  const std::vector<std::string> samples = {
      "tcp://node1:29500?rank=3&world_size=8", "tcp://[2001:db8::1]:29500/?world_size=2",
      "env://?rank=0", "file:///tmp/some/file?rank=1&world_size=4"};
  for (const std::string& sample : samples) {
    ASSERT_TRUE(parse_init_url(sample).ok());
    for (std::size_t cut = 0; cut < sample.size(); ++cut)
      static_cast<void>(parse_init_url(sample.substr(0, cut)).ok());
  }
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const std::string text = fuzz.one_in(3)
                                 ? samples[fuzz.below(4)].substr(0, 6) +
                                       fuzz.babble(40, "abc:/?&=[]0123456789rankworld_size-")
                                 : fuzz.damaged(samples[fuzz.below(4)]);
    const auto url = parse_init_url(text);
    if (!url.ok()) {
      EXPECT_EQ(url.status().code(), Code::invalid_argument);
      EXPECT_NE(url.status().message().find(text), std::string::npos);
      continue;
    }
    EXPECT_EQ(url->host.empty(), url->scheme != InitUrl::Scheme::tcp) << text;
    EXPECT_EQ(url->port == 0, url->scheme != InitUrl::Scheme::tcp) << text;
    EXPECT_EQ(url->path.empty(), url->scheme != InitUrl::Scheme::file) << text;
    EXPECT_TRUE(!url->rank || *url->rank >= 0) << text;
    EXPECT_TRUE(!url->world_size || *url->world_size > 0) << text;
  }
}

}  // namespace
}  // namespace muster::store
