#include "muster/launch/node_link.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "muster/launch/spawn.h"
#include "muster/store/factory.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr NodeLinkLimits kShort{
    .beat = milliseconds(50), .silence = milliseconds(1500), .tell = milliseconds(500)};
const std::string kSecret = "a secret for the tests";

store::TcpStoreOptions store_options(std::uint16_t port, bool serve) {
  store::TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = port;
  options.is_server = serve;
  options.wait_for_workers = false;
  options.timeout = seconds(60);
  options.secret = Secret::given(kSecret);
  return options;
}

NodeJob node(int number, std::shared_ptr<store::Store> store, std::uint16_t port) {
  NodeJob job;
  job.node = number;
  job.hosts_store = number == 0;
  job.host_node = 0;
  job.nodes = {NodeFacts{1, "default", "host-a", 0}, NodeFacts{1, "default", "host-b", 0}};
  job.store = std::move(store);
  job.master_addr = "127.0.0.1";
  job.master_port = port;
  job.key_prefix = "test/";
  return job;
}

/// The next event, which must come within a minute.
AgentEvent next_event(NodeLink& link) {
  pollfd ready{link.descriptor(), POLLIN, 0};
  if (::poll(&ready, 1, 60'000) != 1) return Begin{};
  const auto events = link.take();
  return events.empty() ? AgentEvent(Begin{}) : events.front();
}

// A stopped process is to its peers what a machine without power is: connections stay open, nothing
// answers. spec: J3 the node that serves the store vanishes without a word: the others notice and
// can end
TEST(NodeLink, ASilentStoreIsTakenForDead) {
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  auto server = start_processes(1, [&](int) {
    auto store = store::make_tcp_store(store_options(0, true));
    if (!store) return store.status();
    const std::uint16_t port = (*store)->port();
    if (::write(told[1], &port, sizeof port) != sizeof port)
      return Status(Code::internal, "the pipe is gone");
    for (;;) ::pause();
  });
  ASSERT_TRUE(server.ok()) << server.status().message();
  std::uint16_t port = 0;
  ASSERT_EQ(::read(told[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  auto store = store::make_tcp_store(store_options(port, false));
  ASSERT_TRUE(store.ok()) << store.status().message();
  auto link = NodeLink::open(node(1, *store, port), kShort);
  ASSERT_TRUE(link.ok()) << link.status().message();
  server->kill(SIGSTOP);
  const AgentEvent event = next_event(**link);
  const auto* failed = std::get_if<NodeFailed>(&event);
  ASSERT_NE(failed, nullptr);
  EXPECT_NE(failed->text.find("127.0.0.1:" + std::to_string(port)), std::string::npos)
      << failed->text;
  EXPECT_NE(failed->text.find("has not answered for 1.5 s"), std::string::npos) << failed->text;
  (*link)->tell_failed(1, "nobody hears this");  // and nothing blocks on the way out
  (*link)->tell_ended();
  link->reset();
  server->kill(SIGCONT);
  ::close(told[0]);
  ::close(told[1]);
}

// spec: J3 a node that falls silent is named to the one that serves the store, which need not wait
// for it any more
TEST(NodeLink, ASilentNodeIsNamed) {
  auto store = store::make_tcp_store(store_options(0, true));
  ASSERT_TRUE(store.ok()) << store.status().message();
  auto link = NodeLink::open(node(0, *store, (*store)->port()), kShort);
  ASSERT_TRUE(link.ok()) << link.status().message();
  pollfd ready{(*link)->descriptor(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 60'000), 1);
  const auto events = (*link)->take();
  ASSERT_FALSE(events.empty());
  const auto* failed = std::get_if<NodeFailed>(&events.front());
  ASSERT_NE(failed, nullptr);
  EXPECT_NE(failed->text.find("node 1 (host-b) has said nothing"), std::string::npos)
      << failed->text;
}

// spec: J3 a failure is told to the other nodes with its exit code
TEST(NodeLink, AFailureIsTold) {
  auto store = store::make_tcp_store(store_options(0, true));
  ASSERT_TRUE(store.ok()) << store.status().message();
  auto other = (*store)->clone();
  ASSERT_TRUE(other.ok()) << other.status().message();
  const std::uint16_t port = (*store)->port();
  auto first = NodeLink::open(node(0, *store, port));
  auto second = NodeLink::open(node(1, *other, port));
  ASSERT_TRUE(first.ok() && second.ok());
  (*second)->tell_failed(7, "its worker has failed");
  const AgentEvent event = next_event(**first);
  const auto* failed = std::get_if<NodeFailed>(&event);
  ASSERT_NE(failed, nullptr);
  EXPECT_EQ(failed->exit_code, 7);
  EXPECT_EQ(failed->text, "its worker has failed");
}

}  // namespace
}  // namespace muster::launch
