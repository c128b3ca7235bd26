// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/socket_address.h"
#include "testing/limits.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>

#include <cerrno>
#include <future>

namespace muster {
namespace {

TEST(SocketAddress, NumericTextBothWays) {
  EXPECT_EQ(SocketAddress::numeric("10.1.2.3", 29500)->text(), "10.1.2.3:29500");
  EXPECT_EQ(SocketAddress::numeric("::1", 29500)->text(), "[::1]:29500");
  EXPECT_EQ(SocketAddress::numeric("[::1]", 1)->host(), "::1");
  EXPECT_EQ(SocketAddress::numeric("ff15::77", 1)->host(), "ff15::77");
  EXPECT_EQ(SocketAddress::numeric("::", 7)->port(), 7);
  for (const char* name :
       {"localhost", "12345", "10.1.2", "10.1.2.3.4", "", "1.2.3.256", ":::", "[::1"})
    EXPECT_FALSE(SocketAddress::numeric(name, 1).ok()) << name;
}

TEST(SocketAddress, KnowsLoopbackAndMulticast) {
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(SocketAddress::numeric(host, 1)->is_loopback()) << host;
  for (const char* host : {"10.0.0.1", "::2", "::ffff:10.0.0.1", "0.0.0.0"})
    EXPECT_FALSE(SocketAddress::numeric(host, 1)->is_loopback()) << host;
  for (const char* host : {"224.0.0.1", "239.255.1.1", "ff15::1"})
    EXPECT_TRUE(SocketAddress::numeric(host, 1)->is_multicast()) << host;
  for (const char* host : {"223.0.0.1", "240.0.0.1", "fe80::1"})
    EXPECT_FALSE(SocketAddress::numeric(host, 1)->is_multicast()) << host;
  EXPECT_EQ(SocketAddress().host(), "no address");
}

TEST(SocketAddress, ResolvesNumbersAndNames) {
  EXPECT_EQ(resolve("127.0.0.1", 5, TimePoint::max())->front().text(), "127.0.0.1:5");
  EXPECT_EQ(resolve("[::1]", 5, TimePoint::max())->front().text(), "[::1]:5");
  const auto local = resolve("localhost", 5, TimePoint::max());
  ASSERT_TRUE(local.ok());
  for (const auto& address : *local) EXPECT_TRUE(address.is_loopback());
  const Status unknown = resolve("no-such-host.invalid", 5, TimePoint::max()).status();
  EXPECT_EQ(unknown.code(), Code::network);
  EXPECT_NE(unknown.message().find("no-such-host.invalid"), std::string::npos);
  EXPECT_EQ(resolve("", 5, TimePoint::max()).status().code(), Code::invalid_argument);
}

// A resolver that never answers is left behind at the deadline; the error names the host and the
// time.
TEST(SocketAddress, ResolverThatHangs) {
  std::promise<void> end;
  const auto hangs = [over = end.get_future().share()](
                         const std::string&,
                         std::uint16_t port) -> Result<std::vector<SocketAddress>> {
    over.wait();
    return std::vector<SocketAddress>{*SocketAddress::numeric("10.0.0.1", port)};
  };
  const Status late =
      resolve("node1", 5, deadline_after(steady_clock(), std::chrono::milliseconds(50)), hangs)
          .status();
  EXPECT_EQ(late.code(), Code::timed_out);
  EXPECT_NE(late.message().find("node1"), std::string::npos) << late.message();
  EXPECT_NE(late.message().find(" ms"), std::string::npos) << late.message();
  NameSearch search("node1", 5, hangs);
  EXPECT_EQ(search.wait(steady_clock().now()), nullptr);
  end.set_value();
  const auto* found = search.wait(TimePoint::max());
  ASSERT_NE(found, nullptr);
  EXPECT_EQ((*found)->front().text(), "10.0.0.1:5");
  // Numbers ask nobody.
  EXPECT_TRUE(resolve("127.0.0.1", 5, steady_clock().now(), nullptr).ok());
}

// spec: B5 all-digit host names are names: the resolver is asked for one with a closing dot
TEST(SocketAddress, ResolverIsAskedForDigitsAsAName) {
  const auto echo = [](const std::string& host,
                       std::uint16_t) -> Result<std::vector<SocketAddress>> {
    return Status(Code::network, "asked for <" + host + ">");
  };
  const Status digits = resolve("12345", 5, TimePoint::max(), echo).status();
  EXPECT_NE(digits.message().find("<12345.>"), std::string::npos) << digits.message();
  EXPECT_NE(digits.message().find("taken as a name"), std::string::npos) << digits.message();
  EXPECT_NE(resolve("[node1]", 5, TimePoint::max(), echo).status().message().find("<node1>"),
            std::string::npos);
}

TEST(SocketAddress, ListensAndConnects) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    const auto listener = listen_on(*SocketAddress::numeric(host, 0), 8);
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    const auto name = SocketAddress::local_of(listener->get());
    ASSERT_NE(name->port(), 0);
    const auto socket = start_connect(*name);
    ASSERT_TRUE(socket.ok()) << socket.status().message();
    pollfd waiting{socket->get(), POLLOUT, 0};
    ASSERT_EQ(::poll(&waiting, 1, muster::testing::kMustHappenMs), 1);
    EXPECT_EQ(SocketAddress::peer_of(socket->get())->text(), name->text());
    EXPECT_EQ(address_towards(*name)->host(), host);
    const Status again = listen_on(*name, 8).status();
    EXPECT_NE(again.message().find(name->text()), std::string::npos) << again.message();
    EXPECT_NE(again.message().find("EADDRINUSE"), std::string::npos) << again.message();
  }
}

TEST(SocketAddress, ErrnoTextReadsOnWithinASentence) {
  EXPECT_EQ(errno_text(ECONNREFUSED), "connection refused (ECONNREFUSED)");
  EXPECT_EQ(errno_text(123456), "error 123456");
}

// spec: A10 an unknown interface is an error that lists those there are
TEST(SocketAddress, InterfacesByName) {
  const auto loopback = interface_addresses("lo");
  ASSERT_TRUE(loopback.ok()) << loopback.status().message();
  EXPECT_TRUE(loopback->front().is_loopback());
  const Status unknown = interface_addresses("nonesuch0").status();
  EXPECT_EQ(unknown.code(), Code::invalid_argument);
  EXPECT_NE(unknown.message().find("nonesuch0"), std::string::npos);
  EXPECT_NE(unknown.message().find("lo"), std::string::npos);
}

}  // namespace
}  // namespace muster
