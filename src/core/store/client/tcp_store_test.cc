// SPDX-License-Identifier: BSD-3-Clause
// Only the TCP store does this: ports, descriptors, users of several jobs, that come and go.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/store/client/tcp_socket.h"
#include "core/store/testing/tcp_servers.h"
#include "testing/raw_peer.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// spec: C2.port_zero port 0 picks a free one and tells it
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

// spec: C2 unauthenticated peers: another user who holds the name of the store's Unix socket, and
// lets nobody through, keeps no rank of this host out: it goes by TCP
TEST(TcpStore, AnotherUserUnderItsUnixSocketsNameKeepsNobodyOut) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const std::uint16_t port = testing::reserve_port();
  const std::string name = local_name_of(*SocketAddress::numeric("127.0.0.1", port));
  const SocketAddress address = testing::abstract_address(name);
  for (const bool full : {false, true}) {
    SCOPED_TRACE(full);
    int ready[2];
    ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    const pid_t squatter = ::fork();
    if (squatter == 0) {
      const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
      const int first = ::socket(AF_UNIX, SOCK_STREAM, 0);
      const bool holds = ::setuid(1) == 0 && ::bind(socket, address.raw(), address.length()) == 0 &&
                         ::listen(socket, full ? 0 : 100) == 0 &&
                         (!full || ::connect(first, address.raw(), address.length()) == 0);
      const char word = holds ? 'y' : 'n';
      if (::write(ready[1], &word, 1) == 1) ::pause();
      ::_exit(0);
    }
    char word = 'n';
    EXPECT_EQ(::read(ready[0], &word, 1), 1);
    EXPECT_EQ(word, 'y');
    auto options = server_options();
    options.port = port;
    const auto server = made(make_tcp_store(options));
    if (server != nullptr) {
      const auto client = made(make_tcp_store(client_options(*server)));
      EXPECT_TRUE(client != nullptr && client->set("key", "value").ok());
    }
    ::kill(squatter, SIGKILL);
    ::waitpid(squatter, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
  }
}

// spec: W1 another user of the host who knocks at the store's Unix socket is refused and counted
TEST(TcpStore, AnotherUserAtItsUnixSocketIsCounted) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const auto server = made(make_tcp_store(server_options()));
  const auto address = testing::abstract_address(
      local_name_of(*SocketAddress::numeric("127.0.0.1", server->port())));
  const pid_t another = ::fork();
  if (another == 0) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    char said = 0;
    const bool refused = ::setuid(1) == 0 &&
                         ::connect(socket, address.raw(), address.length()) == 0 &&
                         ::recv(socket, &said, 1, 0) <= 0;
    ::_exit(refused ? 0 : 1);
  }
  int ended = 1;
  ::waitpid(another, &ended, 0);
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(*server->count_refusals(), 1);
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
  const Status foreign = make_tcp_store(server_options("192.0.2.1"))
                             .status();  // an address for documentation: nobody's
  EXPECT_EQ(foreign.code(), Code::network);
  EXPECT_TRUE(mentions(foreign, "not this host's")) << foreign.message();
  const auto everywhere = made(make_tcp_store(server_options("0.0.0.0")));
  elsewhere.port = everywhere->port();
  elsewhere.timeout = kLong;
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

// spec: C2.early_clients clients started before the server wait for it
TEST(TcpStore, ClientsWaitForTheServer) {
  const auto port = testing::reserve_port();
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
  const auto port = testing::reserve_port();
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

// spec: C2.users wait_for_workers: the server's own user waits until world_size users have come,
// its own included; C15 world_size of TCPStore counts the server's own user
TEST(TcpStore, WaitsForWorkers) {
  const auto port = testing::reserve_port();
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
  options.timeout = kInVain;
  const Status status = make_tcp_store(options).status();
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_TRUE(mentions(status, "1 of 3 users")) << status.message();
  options.timeout = std::chrono::minutes(1);
  options.wait_for_workers = false;
  EXPECT_TRUE(make_tcp_store(options).ok());
  options.wait_for_workers = true;
  options.world_size = -1;
  EXPECT_TRUE(make_tcp_store(options).ok());
  options.world_size.reset();
  EXPECT_TRUE(make_tcp_store(options).ok());
}

// spec: C3.multi_tenant multi_tenant: instances of one process with the same host and port share
// one server
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

// Each of them is a master that waits for both.
// spec: C3 multi_tenant: instances that share a server wait for the same workers
TEST(TcpStore, MultiTenantMastersBothWait) {
  auto options = server_options();
  options.port = testing::reserve_port();
  options.multi_tenant = true;
  options.world_size = 3;
  options.wait_for_workers = true;
  auto first = std::async(std::launch::async, [&] { return make_tcp_store(options); });
  auto second = std::async(std::launch::async, [&] { return make_tcp_store(options); });
  auto third = options;
  third.is_server = false;
  const auto worker = made(make_tcp_store(third));
  const auto one = made(first.get());
  const auto other = made(second.get());
  EXPECT_EQ(*one->num_keys(), 1);
  EXPECT_EQ(one->port(), other->port());
}

// spec: C3.listen_fd master_listen_fd: serves on a socket that is already bound
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

/// A bound socket, and whether any descriptor of this process still leads to it.
struct Bound {
  Descriptor socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::uint16_t port = 0;
  ino_t number = 0;

  Bound() {
    const auto any = SocketAddress::numeric("127.0.0.1", 0);
    EXPECT_EQ(::bind(socket.get(), any->raw(), any->length()), 0);
    port = SocketAddress::local_of(socket.get())->port();
    number = number_of(socket.get());
  }
  static ino_t number_of(int descriptor) {
    struct stat found {};
    return ::fstat(descriptor, &found) == 0 && S_ISSOCK(found.st_mode) ? found.st_ino : 0;
  }
  bool is_open() const {
    for (int descriptor = 0; descriptor < 1024; ++descriptor) {
      if (number_of(descriptor) == number) return true;
    }
    return false;
  }
};

// spec: C3 master_listen_fd: closed whatever comes of it: a bad secret, another's port, a store
// that does not serve, a server already there
TEST(TcpStore, ListenDescriptorIsNeverLeaked) {
  const auto refused = [](TcpStoreOptions options, const std::string& why) {
    Bound bound;
    EXPECT_TRUE(bound.is_open());
    options.listen_descriptor = bound.socket.release();
    const Status status = make_tcp_store(options).status();
    EXPECT_EQ(status.code(), Code::invalid_argument) << status.message();
    EXPECT_TRUE(mentions(status, why)) << status.message();
    EXPECT_FALSE(bound.is_open()) << why;
  };
  auto options = server_options();
  options.is_server = false;
  refused(options, "is_master");
  refused(server_options("127.0.0.1", 1), "port");
  options = server_options();
  options.secret.reset();
  ::setenv("MUSTER_SECRET", "short", 1);
  refused(options, "MUSTER_SECRET");
  ::unsetenv("MUSTER_SECRET");

  Bound bound;
  options = server_options();
  options.multi_tenant = true;
  options.listen_descriptor = ::dup(bound.socket.get());
  auto first = made(make_tcp_store(options));
  EXPECT_EQ(first->port(), bound.port);
  options.listen_descriptor = bound.socket.release();
  auto second = made(make_tcp_store(options));
  EXPECT_EQ(second->port(), first->port());
  ASSERT_TRUE(first->set("key", "value").ok());
  EXPECT_EQ(*second->get("key"), "value");
  first.reset();
  second.reset();
  EXPECT_FALSE(bound.is_open());
}

// spec: C3 master_listen_fd: a socket that is bound to nothing would listen anywhere
TEST(TcpStore, ListenDescriptorMustBeBound) {
  auto options = server_options();
  options.listen_descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const Status status = make_tcp_store(options).status();
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(mentions(status, "bound")) << status.message();
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
  auto waiting = std::async(std::launch::async,
                            [&] { return server->all_gather("key", 0, 3, "zero", kLong); });
  for (Duration time = milliseconds(20);
       waiting.wait_for(milliseconds(100)) != std::future_status::ready; time *= 2) {
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
  for (int i = 0; i < kClients; ++i)
    clients.push_back(made(make_tcp_store(client_options(*server))));
  std::vector<std::thread> waiting;
  std::atomic<int> got = 0;
  for (const auto& client : clients) {
    waiting.emplace_back([&got, client] { got += client->get("key").ok() ? 1 : 0; });
  }
  ASSERT_TRUE(server->set("key", "value").ok());
  for (auto& each : waiting) each.join();
  EXPECT_EQ(got, kClients);
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

// spec: C14 clone: a forked child of a user has a connection of its own and does not keep the
// parent's open
TEST(TcpStore, ForkedChild) {
  const auto server = made(make_tcp_store(server_options()));
  const auto client = made(make_tcp_store(client_options(*server)));
  ASSERT_TRUE(client->set("before", "fork").ok());
  const int failures = with_few_files(1024, [&] {
    const auto got = client->get("before");
    return got.ok() && *got == "fork" && client->set("child", "was here").ok() ? 0 : 1;
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(*client->get("child"), "was here");
  EXPECT_EQ(*server->get("child"), "was here");
}

// spec: C2 without a given secret only this host's ranks: the same user's processes find each other
// by a key in a directory of its own
TEST(TcpStore, HostSecret) {
  const testing::ScratchFolder folder;
  const int failures = with_few_files(1024, [&] {
    ::unsetenv("MUSTER_SECRET");
    ::unsetenv("MUSTER_SECRET_FILE");
    ::unsetenv("MUSTER_INSECURE");
    ::setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1);
    auto options = server_options();
    options.secret.reset();
    const auto server = make_tcp_store(options);
    if (!server.ok()) return 1;
    auto client = client_options(**server);
    client.secret.reset();
    const auto joined = make_tcp_store(client);
    if (!joined.ok() || !(*joined)->set("key", "value").ok()) return 2;
    client.secret = kTcpSecret;
    return make_tcp_store(client).status().code() == Code::refused ? 0 : 3;
  });
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace muster::store
