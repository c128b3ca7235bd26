// What only the TCP store does: ports, descriptors, tenants, and standing its ground against strangers.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "muster/base/descriptor.h"
#include "muster/base/handshake.h"
#include "muster/base/socket_address.h"
#include "muster/store/factory.h"
#include "muster/store/store_protocol.h"
#include "muster/testing/seed.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kLong = seconds(60);
const Secret kSecret = Secret::given("the secret of the tcp store's tests");

TcpStoreOptions server_options(const std::string& host = "127.0.0.1", std::uint16_t port = 0) {
  TcpStoreOptions options;
  options.host = host;
  options.port = port;
  options.is_server = true;
  options.timeout = kLong;
  options.secret = kSecret;
  return options;
}

TcpStoreOptions client_options(const TcpStore& server) {
  TcpStoreOptions options = server_options(server.host(), server.port());
  options.is_server = false;
  return options;
}

std::shared_ptr<TcpStore> made(const Result<std::shared_ptr<TcpStore>>& store) {
  EXPECT_TRUE(store.ok()) << store.status().message();
  return store.ok() ? *store : nullptr;
}

bool mentions(const Status& status, const std::string& text) { return status.message().find(text) != std::string::npos; }

/// A bare connection, for those who do not behave.
class Stranger {
 public:
  explicit Stranger(std::uint16_t port) {
    auto socket = start_connect(*SocketAddress::numeric("127.0.0.1", port));
    EXPECT_TRUE(socket.ok()) << socket.status().message();
    socket_ = std::move(*socket);
    pollfd waiting{socket_.get(), POLLOUT, 0};
    EXPECT_EQ(::poll(&waiting, 1, 10000), 1);
  }
  bool send(std::string_view bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  /// Everything until the other side closes; nothing if it has not within `limit`.
  std::optional<std::string> read_to_end(Duration limit = kLong) {
    std::string all;
    char piece[4096];
    const TimePoint deadline = steady_clock().now() + limit;
    for (;;) {
      pollfd waiting{socket_.get(), POLLIN, 0};
      const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock().now()).count();
      if (left <= 0 || ::poll(&waiting, 1, static_cast<int>(left)) <= 0) return std::nullopt;
      const ssize_t n = ::recv(socket_.get(), piece, sizeof piece, 0);
      if (n <= 0) return all;
      all.append(piece, static_cast<std::size_t>(n));
    }
  }
  std::string read(std::size_t count) {
    std::string all(count, '\0');
    std::size_t have = 0;
    while (have < count) {
      pollfd waiting{socket_.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 10000) <= 0) break;
      const ssize_t n = ::recv(socket_.get(), all.data() + have, count - have, 0);
      if (n <= 0) break;
      have += static_cast<std::size_t>(n);
    }
    all.resize(have);
    return all;
  }
  /// Proves the secret like a client; true if it was let in.
  bool authenticate(const Secret& secret, const std::string& job = "") {
    Handshake handshake(Handshake::Side::connector, {.job = job, .build = kStoreBuild}, secret);
    for (;;) {
      if (!send(handshake.take_output())) return false;
      if (handshake.done()) return true;
      if (handshake.failed()) return false;
      const std::string byte = read(1);
      if (byte.empty()) return false;
      handshake.feed(as_bytes(byte));
    }
  }
  int descriptor() const { return socket_.get(); }

 private:
  Descriptor socket_;
};

/// A server with a client that must not be harmed by whatever a test does.
class Strangers : public ::testing::Test {
 protected:
  void expect_unharmed() {
    const std::string value = std::to_string(++count_);
    ASSERT_TRUE(client->set("key", value).ok());
    const auto newcomer = made(make_tcp_store(client_options(*server)));
    ASSERT_NE(newcomer, nullptr);
    EXPECT_EQ(*newcomer->get("key"), value);
  }
  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
  std::shared_ptr<TcpStore> client = made(make_tcp_store(client_options(*server)));

 private:
  int count_ = 0;
};

// spec: C2 port 0 picks a free one and tells it
TEST(TcpStore, PortZeroPicksAFreeOne) {
  const auto first = made(make_tcp_store(server_options()));
  const auto second = made(make_tcp_store(server_options()));
  EXPECT_NE(first->port(), 0);
  EXPECT_NE(first->port(), second->port());
  EXPECT_EQ(first->host(), "127.0.0.1");
  const auto client = made(make_tcp_store(client_options(*first)));
  ASSERT_TRUE(first->set("key", "value").ok());
  EXPECT_EQ(*client->get("key"), "value");
  EXPECT_FALSE(*second->check(std::vector<std::string>{"key"}));
}

// spec: C2 IPv6 addresses and names
TEST(TcpStore, ServesIPv6AndNames) {
  for (const char* host : {"::1", "[::1]", "localhost", "127.0.0.1"}) {
    const auto server = made(make_tcp_store(server_options(host)));
    const auto client = made(make_tcp_store(client_options(*server)));
    ASSERT_TRUE(server->set("key", host).ok());
    EXPECT_EQ(*client->get("key"), host);
  }
}

// Nothing listens where it was not asked to.
// spec: C2 host_name: only its own addresses are listened on
TEST(TcpStore, ListensOnlyWhereItWasAsked) {
  const auto server = made(make_tcp_store(server_options("127.0.0.1")));
  auto elsewhere = client_options(*server);
  elsewhere.host = "127.0.0.2";
  elsewhere.timeout = milliseconds(200);
  EXPECT_EQ(make_tcp_store(elsewhere).status().code(), Code::timed_out);
  const Status foreign = make_tcp_store(server_options("192.0.2.1")).status();  // an address for documentation: nobody's
  EXPECT_EQ(foreign.code(), Code::network);
  EXPECT_TRUE(mentions(foreign, "not this host's")) << foreign.message();
  const auto everywhere = made(make_tcp_store(server_options("0.0.0.0")));
  elsewhere.port = everywhere->port();
  EXPECT_TRUE(make_tcp_store(elsewhere).ok());
}

// spec: C2 a port in use is an error that names it
TEST(TcpStore, PortInUse) {
  const auto server = made(make_tcp_store(server_options()));
  const Status status = make_tcp_store(server_options("127.0.0.1", server->port())).status();
  EXPECT_EQ(status.code(), Code::network);
  EXPECT_TRUE(mentions(status, std::to_string(server->port()))) << status.message();
  EXPECT_TRUE(mentions(status, "EADDRINUSE")) << status.message();
}

// spec: C2 clients started before the server wait for it
TEST(TcpStore, ClientsWaitForTheServer) {
  const auto port = made(make_tcp_store(server_options()))->port();  // free again as soon as its store is gone
  auto options = server_options("127.0.0.1", port);
  options.is_server = false;
  std::vector<std::future<bool>> clients;
  std::atomic<int> started = 0;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(std::async(std::launch::async, [&] {
      ++started;
      const auto client = make_tcp_store(options);
      return client.ok() && *(*client)->get("key") == "value";
    }));
  }
  while (started < 4) std::this_thread::yield();
  const auto server = made(make_tcp_store(server_options("127.0.0.1", port)));
  ASSERT_TRUE(server->set("key", "value").ok());
  for (auto& each : clients) EXPECT_TRUE(each.get());
}

// spec: C2 timeout: a client without a server says where it looked and how long
TEST(TcpStore, NoServer) {
  const auto port = made(make_tcp_store(server_options()))->port();
  auto options = server_options("127.0.0.1", port);
  options.is_server = false;
  options.timeout = milliseconds(100);
  const Status status = make_tcp_store(options).status();
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_TRUE(mentions(status, "127.0.0.1:" + std::to_string(port))) << status.message();
  EXPECT_TRUE(mentions(status, "ECONNREFUSED")) << status.message();
}

// spec: C2 something else that listens there is told apart from a server that is not up yet
TEST(TcpStore, SomethingElseListens) {
  const auto listener = listen_on(*SocketAddress::numeric("127.0.0.1", 0), 8);
  auto options = server_options("127.0.0.1", SocketAddress::local_of(listener->get())->port());
  options.is_server = false;
  const Status status = make_tcp_store(options).status();
  EXPECT_EQ(status.code(), Code::refused) << status.message();
  EXPECT_TRUE(mentions(status, "another program")) << status.message();
}

// spec: C2 wait_for_workers: the server's own user waits until world_size users have come, its own included
// spec: C15 world_size of TCPStore counts the server's own user
TEST(TcpStore, WaitsForWorkers) {
  const auto port = made(make_tcp_store(server_options()))->port();
  auto options = server_options("127.0.0.1", port);
  options.world_size = 3;
  auto server = std::async(std::launch::async, [&] { return make_tcp_store(options); });
  auto client = options;
  client.is_server = false;
  const auto first = made(make_tcp_store(client));
  EXPECT_EQ(server.wait_for(milliseconds(50)), std::future_status::timeout);
  const auto second = made(make_tcp_store(client));
  EXPECT_TRUE(server.get().ok());
}

// spec: C2 wait_for_workers: at the timeout says how many came
// spec: C15 None and -1 mean not fixed; without wait_for_workers nobody waits
TEST(TcpStore, SaysHowManyWorkersCame) {
  auto options = server_options();
  options.world_size = 3;
  options.timeout = milliseconds(100);
  const Status status = make_tcp_store(options).status();
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_TRUE(mentions(status, "1 of 3 users")) << status.message();
  options.wait_for_workers = false;
  EXPECT_TRUE(make_tcp_store(options).ok());
  options.wait_for_workers = true;
  options.world_size = -1;
  EXPECT_TRUE(make_tcp_store(options).ok());
  options.world_size.reset();
  EXPECT_TRUE(make_tcp_store(options).ok());
}

// spec: C3 multi_tenant: instances of one process with the same host and port share one server
TEST(TcpStore, MultiTenant) {
  auto options = server_options();
  options.multi_tenant = true;
  auto first = made(make_tcp_store(options));
  options.port = first->port();
  const auto second = made(make_tcp_store(options));
  ASSERT_TRUE(first->set("key", "value").ok());
  EXPECT_EQ(*second->get("key"), "value");
  first.reset();  // the server lives as long as one of them
  EXPECT_EQ(*second->get("key"), "value");
}

// spec: C3 master_listen_fd: serves on a socket that is already bound
TEST(TcpStore, ListenDescriptor) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM, 0));
  const auto address = SocketAddress::numeric("127.0.0.1", 0);
  ASSERT_EQ(::bind(socket.get(), address->raw(), address->length()), 0);
  const auto port = SocketAddress::local_of(socket.get())->port();
  auto options = server_options();
  options.listen_descriptor = socket.release();
  const auto server = made(make_tcp_store(options));
  EXPECT_EQ(server->port(), port);
  const auto client = made(make_tcp_store(client_options(*server)));
  ASSERT_TRUE(client->set("key", "value").ok());
  options.listen_descriptor = ::dup(STDERR_FILENO);
  EXPECT_EQ(make_tcp_store(options).status().code(), Code::invalid_argument);
}

// spec: C7 a client whose server has gone says so, and does not wait for the deadline
TEST(TcpStore, ServerGone) {
  auto server = made(make_tcp_store(server_options()));
  const auto client = made(make_tcp_store(client_options(*server)));
  auto waiting = std::async(std::launch::async, [&] { return client->get("never", kLong); });
  const auto other = made(make_tcp_store(client_options(*server)));
  server.reset();
  const Status status = waiting.get().status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.code(), Code::timed_out) << status.message();
  EXPECT_TRUE(mentions(status, "never")) << status.message();
  EXPECT_EQ(other->set("key", "").code(), Code::network);
}

// spec: C14 all_gather: a member whose process ends while the others wait is named
TEST(TcpStore, AllGatherNamesAMemberThatDied) {
  const auto server = made(make_tcp_store(server_options()));
  auto waiting = std::async(std::launch::async, [&] { return server->all_gather("key", 0, 3, "zero", kLong); });
  for (Duration time = milliseconds(20); waiting.wait_for(milliseconds(100)) != std::future_status::ready; time *= 2) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto client = make_tcp_store(client_options(*server));
      ::_exit(client.ok() && (*client)->all_gather("key", 2, 3, "two", kLong).ok() ? 0 : 1);
    }
    waiting.wait_for(time);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  const Status status = waiting.get().status();
  EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
  EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
}

// spec: C7 concurrent waiters: hundreds of clients wait for one key and get it
TEST(TcpStore, ManyClients) {
  constexpr int kClients = 300;
  const auto server = made(make_tcp_store(server_options()));
  std::vector<std::shared_ptr<TcpStore>> clients;
  for (int i = 0; i < kClients; ++i) clients.push_back(made(make_tcp_store(client_options(*server))));
  std::vector<std::thread> waiting;
  std::atomic<int> got = 0;
  for (const auto& client : clients) {
    waiting.emplace_back([&got, client] { got += client->get("key").ok() ? 1 : 0; });
  }
  ASSERT_TRUE(server->set("key", "value").ok());
  for (auto& each : waiting) each.join();
  EXPECT_EQ(got, kClients);
}

// spec: C2 another job, another secret, another kind of secret: refused at once, with the reason
TEST_F(Strangers, RefusalsSayWhy) {
  auto options = client_options(*server);
  options.secret = Secret::given("quite another secret");
  const TimePoint begin = steady_clock().now();
  const Status secret = make_tcp_store(options).status();
  EXPECT_EQ(secret.code(), Code::refused);
  EXPECT_TRUE(mentions(secret, "MUSTER_SECRET")) << secret.message();
  options.secret = kSecret;
  options.job = "another job";
  const Status job = make_tcp_store(options).status();
  EXPECT_EQ(job.code(), Code::refused);
  EXPECT_TRUE(mentions(job, "job")) << job.message();
  EXPECT_LT(steady_clock().now() - begin, kLong / 2);
  expect_unharmed();
}

// spec: C2 strangers: random bytes are refused, nobody else is disturbed
TEST_F(Strangers, RandomBytes) {
  std::mt19937_64 random(testing::test_seed());
  for (int i = 0; i < 200; ++i) {
    Stranger stranger(server->port());
    std::string bytes(1 + random() % 300, '\0');
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random()); });
    bytes[0] = 'x';
    stranger.send(bytes);
    const auto answer = stranger.read_to_end();
    ASSERT_TRUE(answer.has_value()) << "the connection is still open";
    EXPECT_EQ(*answer, "");  // not a word to somebody who does not even greet
  }
  expect_unharmed();
}

// spec: C2 strangers: a wrong secret gets the acceptor's greeting and one byte of refusal, and nothing that the secret has made
TEST_F(Strangers, WrongSecret) {
  for (int i = 0; i < 50; ++i) {
    Stranger stranger(server->port());
    EXPECT_FALSE(stranger.authenticate(Secret::given("guess number " + std::to_string(i))));
    EXPECT_EQ(stranger.read_to_end(), "");
  }
  expect_unharmed();
}

// spec: C2 strangers: one byte, then silence: closed after the limit of five seconds; nobody else waits for it
TEST_F(Strangers, OneByteAndSilence) {
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.push_back(std::make_unique<Stranger>(server->port()));
    strangers.back()->send("m");
  }
  expect_unharmed();
  for (auto& each : strangers) EXPECT_EQ(each->read_to_end(), "");
}

// spec: C2 strangers: 300 and more idle connections keep nobody out; the oldest have to go
TEST_F(Strangers, ManyIdleConnections) {
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 400; ++i) strangers.push_back(std::make_unique<Stranger>(server->port()));
  expect_unharmed();
  EXPECT_EQ(strangers.front()->read_to_end(seconds(4)), "") << "with 400 strangers and 256 places the first should have had to go at once";
  expect_unharmed();
}

// spec: C2 lying lengths after authentication are refused before they allocate
TEST_F(Strangers, LyingLengths) {
  for (const std::uint32_t length : {0u, 1u, 11u, static_cast<std::uint32_t>(kMaxFrameBytes) + 1, 0xffffffffu}) {
    Stranger liar(server->port());
    ASSERT_TRUE(liar.authenticate(kSecret));
    ByteWriter lie;
    lie.put(length).put_bytes("some bytes");
    liar.send(lie.view());
    EXPECT_EQ(liar.read_to_end(), "") << length;
  }
  // A length within the limit costs what has come, not what was said.
  std::vector<std::unique_ptr<Stranger>> patient;
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  for (int i = 0; i < 50; ++i) {
    patient.push_back(std::make_unique<Stranger>(server->port()));
    ASSERT_TRUE(patient.back()->authenticate(kSecret));
    ByteWriter claim;
    claim.put(static_cast<std::uint32_t>(kMaxFrameBytes));
    patient.back()->send(claim.view());
  }
  expect_unharmed();
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10) << "KiB";
  // Counts and lengths inside a request that do not fit it.
  Request request{.op = Op::set, .keys = {"key"}, .values = {"value"}};
  std::string frame = encode_head(request, 1) + "value";
  for (const std::size_t at : {40u, 44u, 48u, 52u}) {
    std::string bad = frame;
    const std::uint32_t huge = 0xfffffff0u;
    std::memcpy(bad.data() + at, &huge, sizeof huge);
    Stranger liar(server->port());
    ASSERT_TRUE(liar.authenticate(kSecret));
    liar.send(bad);
    EXPECT_EQ(liar.read_to_end(), "") << at;
  }
  expect_unharmed();
}

// spec: C2 a client that does not take its replies is not read from any more; it neither stops nor starves the others
TEST_F(Strangers, SlowReader) {
  ASSERT_TRUE(client->set("large", std::string(1 << 20, 'x')).ok());
  Stranger slow(server->port());
  ASSERT_TRUE(slow.authenticate(kSecret));
  const std::string frame = encode_head(Request{.op = Op::get, .timeout = kLong, .keys = {"large"}}, 1);
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
TEST_F(Strangers, RequestsInPieces) {
  Stranger odd(server->port());
  ASSERT_TRUE(odd.authenticate(kSecret));
  std::string all = encode_head(Request{.op = Op::set, .keys = {"odd"}, .values = {"value"}}, 7) + "value";
  for (const char byte : all) ASSERT_TRUE(odd.send({&byte, 1}));
  all.clear();
  for (std::uint64_t id = 8; id < 58; ++id) all += encode_head(Request{.op = Op::add, .number = 1, .keys = {"count"}}, id);
  ASSERT_TRUE(odd.send(all));
  FrameReader frames;
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

/// Runs `body` in a child with its own limit of files; its exit code is the number of failures.
int with_few_files(rlim_t files, const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{files, files};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100;
}

// spec: C2 no file descriptors left: newcomers wait, those inside go on, and it recovers
TEST(TcpStore, NoFilesLeft) {
  int ports[2];
  ASSERT_EQ(::pipe(ports), 0);
  const pid_t server_process = ::fork();
  if (server_process == 0) {
    const rlimit limit{40, 40};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    auto server = made(make_tcp_store(server_options()));
    const std::uint16_t port = server->port();
    const bool told = ::write(ports[1], &port, sizeof port) == sizeof port;
    const bool ended = server->get("end", kLong).ok();
    server.reset();  // the last reply shall not be lost
    ::_exit(told && ended ? 0 : 1);
  }
  std::uint16_t port = 0;
  ASSERT_EQ(::read(ports[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  auto options = server_options("127.0.0.1", port);
  options.is_server = false;
  const auto inside = made(make_tcp_store(options));
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<Stranger>> crowd;
    for (int i = 0; i < 60; ++i) crowd.push_back(std::make_unique<Stranger>(port));
    EXPECT_TRUE(inside->set("key", std::to_string(round)).ok());
    auto newcomer = std::async(std::launch::async, [&] { return make_tcp_store(options); });
    crowd.clear();
    const auto joined = newcomer.get();
    ASSERT_TRUE(joined.ok()) << joined.status().message();
    EXPECT_EQ(*(*joined)->get("key"), std::to_string(round));
  }
  ASSERT_TRUE(inside->set("end", "").ok());
  int status = 0;
  ::waitpid(server_process, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// spec: C14 clone: a forked child of a user has a connection of its own and does not keep the parent's open
TEST_F(Strangers, ForkedChild) {
  ASSERT_TRUE(client->set("before", "fork").ok());
  const int failures = with_few_files(1024, [&] {
    const auto got = client->get("before");
    return got.ok() && *got == "fork" && client->set("child", "was here").ok() ? 0 : 1;
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(*client->get("child"), "was here");
  expect_unharmed();
}

// spec: C2 without a given secret only this host's ranks: the same user's processes find each other by a key in a directory of its own
TEST(TcpStore, HostSecret) {
  std::string pattern = (std::filesystem::temp_directory_path() / "muster-host-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const int failures = with_few_files(1024, [&] {
    ::unsetenv("MUSTER_SECRET");
    ::unsetenv("MUSTER_SECRET_FILE");
    ::unsetenv("MUSTER_INSECURE");
    ::setenv("XDG_RUNTIME_DIR", pattern.c_str(), 1);
    auto options = server_options();
    options.secret.reset();
    const auto server = make_tcp_store(options);
    if (!server.ok()) return 1;
    auto client = client_options(**server);
    client.secret.reset();
    const auto joined = make_tcp_store(client);
    if (!joined.ok() || !(*joined)->set("key", "value").ok()) return 2;
    client.secret = kSecret;
    return make_tcp_store(client).status().code() == Code::refused ? 0 : 3;
  });
  EXPECT_EQ(failures, 0);
  std::filesystem::remove_all(pattern);
}

}  // namespace
}  // namespace muster::store
