// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/link_figures.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/time/clock.h"
#include "testing/limits.h"

namespace muster {
namespace {

/// Both ends of a connection over loopback.
struct Connection {
  Connection() {
    const Descriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.get(), place, length), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), place, &length), 0);
    here = Descriptor(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(::connect(here.get(), place, length), 0);
    there = Descriptor(::accept(listener.get(), nullptr, nullptr));
  }
  Descriptor here, there;
};

TEST(LinkFigures, AreThoseOfTheKernel) {
  const auto [here, there] = Connection();
  const std::string bytes(1000, 'x');
  std::string got(bytes.size(), '\0');
  ASSERT_EQ(::send(here.get(), bytes.data(), bytes.size(), 0), std::ssize(bytes));
  ASSERT_EQ(::recv(there.get(), got.data(), got.size(), MSG_WAITALL), std::ssize(bytes));
  const auto figures = link_figures(here.get());
  ASSERT_TRUE(figures.has_value());
  EXPECT_EQ(figures->sent, bytes.size());
  EXPECT_EQ(figures->resent, 0u);
  EXPECT_GT(figures->round_trip.count(), 0);
}

// The kernel of a process that does not read acknowledges a part of what it is sent
TEST(SendPosition, EndsWherePeersBuffersAreFull) {
  const auto [here, there] = Connection();
  const auto before = send_position(here.get());
  ASSERT_TRUE(before.has_value());
  std::string bytes(1 << 20, 'x');
  std::uint64_t sent = 0;
  for (ssize_t took; (took = ::send(here.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0;)
    sent += static_cast<std::uint64_t>(took);
  const auto full = send_position(here.get());
  ASSERT_TRUE(full.has_value());
  EXPECT_GT(full->written, full->acknowledged);
  EXPECT_LT(full->acknowledged - before->acknowledged, sent);
  for (std::uint64_t left = sent; left > 0;) {
    const ssize_t got = ::recv(there.get(), bytes.data(), bytes.size(), 0);
    ASSERT_GT(got, 0);
    left -= static_cast<std::uint64_t>(got);
  }
  const TimePoint limit = deadline_after(steady_clock(), testing::kMustHappen);
  auto after = full;
  while (after && after->acknowledged - before->acknowledged < sent && steady_clock().now() < limit)
    after = send_position(here.get());
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->acknowledged - before->acknowledged, sent);
  EXPECT_EQ(after->written - before->written, sent);
}

TEST(LinkFigures, OtherDescriptorsHaveNone) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const Descriptor one(pair[0]), other(pair[1]);
  EXPECT_FALSE(link_figures(one.get()).has_value());
  EXPECT_FALSE(link_figures(-1).has_value());
  EXPECT_FALSE(send_position(one.get()).has_value());
  EXPECT_FALSE(send_position(-1).has_value());
}

}  // namespace
}  // namespace muster
