// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/link_figures.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "core/base/descriptor.h"

namespace muster {
namespace {

TEST(LinkFigures, AreThoseOfTheKernel) {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const place = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(listener.get(), place, length), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), place, &length), 0);
  const Descriptor here(::socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(::connect(here.get(), place, length), 0);
  const Descriptor there(::accept(listener.get(), nullptr, nullptr));
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

TEST(LinkFigures, OtherDescriptorsHaveNone) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const Descriptor one(pair[0]), other(pair[1]);
  EXPECT_FALSE(link_figures(one.get()).has_value());
  EXPECT_FALSE(link_figures(-1).has_value());
}

}  // namespace
}  // namespace muster
