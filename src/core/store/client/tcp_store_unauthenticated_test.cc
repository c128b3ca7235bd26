// SPDX-License-Identifier: BSD-3-Clause
// The TCP store's server among unauthenticated peers, and among clients that break the protocol.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "core/store/store_protocol.h"
#include "core/store/testing/tcp_servers.h"
#include "testing/budget.h"
#include "testing/process_usage.h"
#include "testing/raw_peer.h"
#include "testing/seed.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RawPeer;

/// The greeting of a client of the store at `port`.
Handshake::Hello hello(std::uint16_t port) {
  return {.job = store_job(port, {}, Handshake::Role::store), .build = kStoreBuild};
}

/// A server with a client that must not be harmed by whatever a test does.
class TcpStoreOutsiders : public ::testing::Test {
 protected:
  void expect_unharmed() {
    const std::string value = std::to_string(++count_);
    ASSERT_TRUE(client->set("key", value).ok());
    const auto late_client = made(make_tcp_store(client_options(*server)));
    ASSERT_NE(late_client, nullptr);
    EXPECT_EQ(*late_client->get("key"), value);
  }
  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
  std::shared_ptr<TcpStore> client = made(make_tcp_store(client_options(*server)));

  /// Asks again after each round trip through the server's thread.
  bool eventually(const std::function<bool()>& done) {
    for (const TimePoint end = steady_clock().now() + kLong; !done();) {
      if (steady_clock().now() > end || !client->set("asked", "again").ok()) return false;
    }
    return true;
  }

 private:
  int count_ = 0;
};

// spec: C2 another job, another secret, another kind of secret: refused at once, with the reason
TEST_F(TcpStoreOutsiders, RefusalsSayWhy) {
  auto options = client_options(*server);
  options.secret = Secret::given("quite another secret");
  const TimePoint begin = steady_clock().now();
  const Status secret = make_tcp_store(options).status();
  EXPECT_EQ(secret.code(), Code::refused);
  EXPECT_TRUE(mentions(secret, "MUSTER_SECRET")) << secret.message();
  options.secret = kTcpSecret;
  options.job = "another job";
  const Status job = make_tcp_store(options).status();
  EXPECT_EQ(job.code(), Code::refused);
  EXPECT_TRUE(mentions(job, "job")) << job.message();
  EXPECT_LT(steady_clock().now() - begin, std::chrono::seconds(30));
  expect_unharmed();
}

// spec: C2 unauthenticated peers: random bytes are refused, nobody else is disturbed
TEST_F(TcpStoreOutsiders, RandomBytes) {
  std::mt19937_64 random(testing::test_seed());
  for (int i = 0; i < 200; ++i) {
    RawPeer outsider(server->port());
    std::string bytes(1 + random() % 300, '\0');
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random()); });
    bytes[0] = 'x';
    outsider.send(bytes);
    const auto answer = outsider.read_to_end();
    ASSERT_TRUE(answer.has_value()) << "the connection is still open";
    EXPECT_EQ(*answer, "");  // not a word to somebody who does not even greet
  }
  expect_unharmed();
}

// spec: C2 unauthenticated peers: a wrong secret gets the acceptor's greeting and one byte of
// refusal, and nothing that the secret has made
TEST_F(TcpStoreOutsiders, WrongSecret) {
  for (int i = 0; i < testing::test_rounds(50, 10'000); ++i) {
    RawPeer outsider(server->port());
    ASSERT_FALSE(outsider.authenticate(Secret::given("guess number " + std::to_string(i)),
                                       hello(server->port())));
    ASSERT_EQ(outsider.read_to_end(), "") << "refused without a further word";
  }
  expect_unharmed();
}

// spec: C2 unauthenticated peers: thousands of malformed connections leave no descriptor, no
// memory, and real clients unharmed
TEST_F(TcpStoreOutsiders, MalformedConnectionsLeaveNothingBehind) {
  std::mt19937_64 random(testing::test_seed());
  const SocketAddress address = testing::loopback_address(server->port());
  const int rounds = testing::test_rounds(500, 10'000);
  expect_unharmed();
  const int descriptors = testing::open_descriptors();
  const auto memory = testing::memory_in_use();
  for (int i = 0; i < rounds; ++i) {
    testing::pester(address, random, hello(server->port()));
    if (i % 50 == 0) {
      ASSERT_TRUE(client->set("round", std::to_string(i)).ok());
      ASSERT_EQ(*client->get("round"), std::to_string(i));
    }
    ASSERT_FALSE(HasFailure()) << "after " << i << " connections; replay with MUSTER_TEST_SEED="
                               << testing::test_seed();
  }
  expect_unharmed();
  EXPECT_TRUE(eventually([&] { return testing::open_descriptors() <= descriptors; }))
      << descriptors << " descriptors became " << testing::open_descriptors();
  if (testing::kMemoryTells) {
    EXPECT_LE(testing::memory_in_use().own, memory.own + (std::size_t{8} << 20));
  }
}

// spec: C2 unauthenticated peers: a thousand connections that never finish the greeting keep nobody
// out, and are closed after five seconds or before
TEST_F(TcpStoreOutsiders, AThousandSilentConnections) {
  std::mt19937_64 random(testing::test_seed());
  const testing::DescriptorLimit enough(4096);
  const std::string greeting =
      Handshake(Handshake::Side::connector, hello(server->port()), kTcpSecret).take_output();
  std::vector<std::unique_ptr<RawPeer>> outsiders;
  for (int i = 0; i < 1000; ++i) {
    outsiders.push_back(std::make_unique<RawPeer>(server->port()));
    if (const std::size_t cut = i % 2 == 0 ? 1 : random() % greeting.size(); cut > 0)
      outsiders.back()->send(greeting.substr(0, cut));
    if (i % 100 == 99) expect_unharmed();
  }
  for (auto& each : outsiders) EXPECT_EQ(each->read_to_end(), "");
  expect_unharmed();
}

// spec: C2 lying lengths after authentication are refused before they allocate
TEST_F(TcpStoreOutsiders, LyingLengths) {
  for (const std::uint32_t length :
       {0u, 1u, 11u, static_cast<std::uint32_t>(kMaxFrameBytes) + 1, 0xffffffffu}) {
    RawPeer liar(server->port());
    ASSERT_TRUE(liar.authenticate(kTcpSecret, hello(server->port())));
    ByteWriter lie;
    lie.put(length).put_bytes("some bytes");
    liar.send(lie.view());
    EXPECT_EQ(liar.read_to_end(), "") << length;
  }
  // A length within the limit costs what has come, not what was said.
  std::vector<std::unique_ptr<RawPeer>> patient;
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  for (int i = 0; i < 50; ++i) {
    patient.push_back(std::make_unique<RawPeer>(server->port()));
    ASSERT_TRUE(patient.back()->authenticate(kTcpSecret, hello(server->port())));
    ByteWriter claim;
    claim.put(static_cast<std::uint32_t>(kMaxFrameBytes));
    patient.back()->send(claim.view());
  }
  expect_unharmed();
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10) << "KiB";
  // Counts and lengths inside a request that do not fit it.
  Request request{.op = StoreOp::set, .keys = {"key"}, .values = {"value"}};
  std::string frame = encode_head(request, 1) + "value";
  for (const std::size_t at : {40u, 44u, 48u, 52u}) {
    std::string bad = frame;
    const std::uint32_t huge = 0xfffffff0u;
    std::memcpy(bad.data() + at, &huge, sizeof huge);
    RawPeer liar(server->port());
    ASSERT_TRUE(liar.authenticate(kTcpSecret, hello(server->port())));
    liar.send(bad);
    EXPECT_EQ(liar.read_to_end(), "") << at;
  }
  expect_unharmed();
}

// spec: C2 a client that does not take its replies is not read from any more; it neither stops nor
// starves the others
TEST_F(TcpStoreOutsiders, SlowReader) {
  ASSERT_TRUE(client->set("large", std::string(1 << 20, 'x')).ok());
  RawPeer slow(server->port());
  ASSERT_TRUE(slow.authenticate(kTcpSecret, hello(server->port())));
  const std::string frame =
      encode_head(Request{.op = StoreOp::get, .timeout = kLong, .keys = {"large"}}, 1);
  std::size_t sent = 0;
  // As many requests as the connection takes: at some time the server stops reading.
  for (int quiet = 0; quiet < 20 && sent < 100000;) {
    if (slow.send(frame)) {
      ++sent;
      continue;
    }
    pollfd waiting{slow.descriptor(), POLLOUT, 0};
    quiet += ::poll(&waiting, 1, 10) == 0 ? 1 : 20;
  }
  expect_unharmed();
  const std::string reply = slow.read(1 << 20);
  EXPECT_EQ(reply.size(), std::size_t{1} << 20);
  expect_unharmed();
}

// spec: C7 a request cut into single bytes, and many requests in one piece, mean the same
TEST_F(TcpStoreOutsiders, RequestsInPieces) {
  RawPeer odd(server->port());
  ASSERT_TRUE(odd.authenticate(kTcpSecret, hello(server->port())));
  std::string all =
      encode_head(Request{.op = StoreOp::set, .keys = {"odd"}, .values = {"value"}}, 7) + "value";
  for (const char byte : all) ASSERT_TRUE(odd.send({&byte, 1}));
  all.clear();
  for (std::uint64_t id = 8; id < 58; ++id)
    all += encode_head(Request{.op = StoreOp::add, .number = 1, .keys = {"count"}}, id);
  ASSERT_TRUE(odd.send(all));
  RequestFrames frames;
  for (std::uint64_t id = 7; id < 58; ++id) {
    std::optional<std::string_view> frame;
    while (!(frame = frames.next())) {
      const std::string byte = odd.read(1);
      ASSERT_FALSE(byte.empty());
      frames.feed(as_bytes(byte));
    }
    const auto reply = decode_reply(*frame);
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->id, id);
    EXPECT_TRUE(reply->reply.status.ok());
  }
  EXPECT_EQ(*client->get("count"), "50");
}

// spec: C2 no file descriptors left: new connections wait, those inside go on, and it recovers
TEST(TcpStore, NoFilesLeft) {
  int ports[2];
  ASSERT_EQ(::pipe(ports), 0);
  const pid_t server_process = ::fork();
  if (server_process == 0) {
    const auto files = static_cast<rlim_t>(testing::open_descriptors() + 34);
    const rlimit limit{files, files};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    auto server = made(make_tcp_store(server_options()));
    const std::uint16_t port = server->port();
    const bool told = ::write(ports[1], &port, sizeof port) == sizeof port;
    const bool ended = server->get("end", kLong).ok();
    server.reset();  // the last reply shall not be lost
    ::_exit(told && ended ? 0 : 1);
  }
  ::close(ports[1]);
  std::uint16_t port = 0;
  ASSERT_EQ(::read(ports[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  auto options = server_options("127.0.0.1", port);
  options.is_server = false;
  const auto inside = made(make_tcp_store(options));
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<RawPeer>> crowd;
    for (int i = 0; i < 60; ++i) crowd.push_back(std::make_unique<RawPeer>(port));
    EXPECT_TRUE(inside->set("key", std::to_string(round)).ok());
    auto late_client = std::async(std::launch::async, [&] { return make_tcp_store(options); });
    crowd.clear();
    const auto joined = late_client.get();
    ASSERT_TRUE(joined.ok()) << joined.status().message();
    EXPECT_EQ(*(*joined)->get("key"), std::to_string(round));
  }
  ASSERT_TRUE(inside->set("end", "").ok());
  int status = 0;
  ::waitpid(server_process, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace muster::store
