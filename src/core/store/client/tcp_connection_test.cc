// SPDX-License-Identifier: BSD-3-Clause
// A client whose server cannot be reached: what it says and does.

#include "core/store/client/tcp_connection.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "core/base/log/log.h"
#include "testing/reserved_port.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;

/// Opens with little patience and time and returns what was logged; the failure in `status`.
std::string logged(const TcpEndpoint& endpoint, Duration limit, Status* status,
                   const Resolver& resolver = ask_resolver, OutageLog* outage = nullptr) {
  const auto before = log_level();
  set_log_level(LogLevel::warning);
  ::testing::internal::CaptureStderr();
  *status = TcpConnection::open(endpoint, deadline_after(steady_clock(), limit), false,
                                milliseconds(20), resolver, outage)
                .status();
  auto text = ::testing::internal::GetCapturedStderr();
  set_log_level(before);
  return text;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TcpEndpoint nobody() {
  return {"127.0.0.1", testing::reserve_port(), Secret::given("the secret of the connection tests"),
          ""};
}

// A wrong MASTER_ADDR is told long before the timeout: which address, why, for how long yet and
// what to check; once.
TEST(TcpConnection, TellsOnceWhomItCannotReach) {
  const auto endpoint = nobody();
  Status status;
  const auto text = logged(endpoint, milliseconds(600), &status);
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_EQ(count(text, "still cannot reach"), 1U) << text;
  for (const std::string& part : {endpoint.name(), std::string("ECONNREFUSED"), std::string("more"),
                                  std::string("MASTER_ADDR")})
    EXPECT_EQ(count(text, part), 1U) << part << " in " << text;
}

// Attempts one after another speak of one outage once, and of no time that is over.
TEST(TcpConnection, TellsOnceOfAnOutageThatOutlastsAttempts) {
  const auto endpoint = nobody();
  OutageLog outage;
  std::string text;
  for (const int limit : {20, 20, 100, 100}) {
    Status status;
    text += logged(endpoint, milliseconds(limit), &status, ask_resolver, &outage);
    EXPECT_EQ(status.code(), Code::timed_out);
  }
  EXPECT_EQ(count(text, "still cannot reach"), 1U) << text;
  EXPECT_EQ(count(text, "for -"), 0U) << text;
}

// A warning comes once, then at growing distances, and once again in the next outage.
TEST(TcpConnection, AnOutageIsToldAtGrowingDistances) {
  OutageLog outage;
  const TimePoint begin{std::chrono::seconds(1000)};
  std::vector<long> told;
  Duration lasted{0};
  for (int second = 0; second < 1000; ++second) {
    if (second == 900) outage.reached();
    const TimePoint now = begin + std::chrono::seconds(second);
    if (outage.say(now, now, std::chrono::seconds(5), lasted))
      told.push_back(lasted / std::chrono::seconds(1));
  }
  EXPECT_EQ(told, (std::vector<long>{5, 35, 70, 140, 280, 560, 5, 35, 70}));
}

// The same where it is the resolver that keeps the client waiting; the deadline holds there too.
TEST(TcpConnection, ResolverThatHangs) {
  std::promise<void> end;
  const auto hangs = [over = end.get_future().share()](
                         const std::string&, std::uint16_t) -> Result<std::vector<SocketAddress>> {
    over.wait();
    return Status(Code::network, "over");
  };
  auto endpoint = nobody();
  endpoint.host = "node1";
  Status status;
  const auto text = logged(endpoint, milliseconds(100), &status, hangs);
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_NE(status.message().find("\"node1\""), std::string::npos) << status.message();
  EXPECT_EQ(count(text, "resolver does not answer for host \"node1\""), 1U) << text;
  end.set_value();
}

// spec: B5 who waits for a late store by name is told what its address answered, however slow the
// next search for the name is
TEST(TcpConnection, ARefusalIsNotTheResolversFault) {
  std::promise<void> end;
  const auto over = end.get_future().share();
  const auto endpoint = nobody();
  const auto asked = std::make_shared<std::atomic<int>>(0);  // the last search outlives this test
  const auto answers_once =
      [asked, over](const std::string&, std::uint16_t port) -> Result<std::vector<SocketAddress>> {
    if ((*asked)++ > 0) over.wait();
    return std::vector<SocketAddress>{*SocketAddress::numeric("::1", port),
                                      *SocketAddress::numeric("127.0.0.1", port)};
  };
  auto by_name = endpoint;
  by_name.host = "node1";
  Status status;
  const auto text = logged(by_name, milliseconds(900), &status, answers_once);
  EXPECT_EQ(status.code(), Code::timed_out);
  for (const std::string& said : {text, status.message()}) {
    EXPECT_EQ(count(said, "resolver"), 0U) << said;
    for (const char* host : {"[::1]:", "127.0.0.1:"})
      EXPECT_EQ(count(said, host + std::to_string(endpoint.port)), 1U) << said;
    EXPECT_GE(count(said, "ECONNREFUSED"), 1U) << said;
  }
  EXPECT_GE(*asked, 2);
  end.set_value();
}

// spec: B5 all-digit host names are names, which the error tells whether or not the resolver
// answers
TEST(TcpConnection, DigitsAreAName) {
  std::promise<void> end;
  const auto hangs = [over = end.get_future().share()](
                         const std::string&, std::uint16_t) -> Result<std::vector<SocketAddress>> {
    over.wait();
    return Status(Code::network, "over");
  };
  const auto knows_nothing = [](const std::string&,
                                std::uint16_t) -> Result<std::vector<SocketAddress>> {
    return Status(Code::network, "not known");
  };
  auto endpoint = nobody();
  endpoint.host = "12345";
  for (const Resolver& resolver : {Resolver(hangs), Resolver(knows_nothing)}) {
    Status status;
    logged(endpoint, milliseconds(100), &status, resolver);
    EXPECT_NE(status.message().find("\"12345\" (digits only: taken as a name"), std::string::npos)
        << status.message();
  }
  end.set_value();
}

// Nothing is said where the server is only a moment late.
TEST(TcpConnection, SaysNothingTooEarly) {
  ::testing::internal::CaptureStderr();
  const Status status =
      TcpConnection::open(nobody(), deadline_after(steady_clock(), milliseconds(50)), false)
          .status();
  EXPECT_EQ(count(::testing::internal::GetCapturedStderr(), "still cannot reach"), 0U);
  EXPECT_EQ(status.code(), Code::timed_out);
}

}  // namespace
}  // namespace muster::store
