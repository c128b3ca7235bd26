// SPDX-License-Identifier: BSD-3-Clause
// PMI-1 against a launcher that stands in this test. (Real launchers: tests/python/mpirun_test.py.)

#include "core/rendezvous/launch_exchange.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "core/base/descriptor.h"
#include "testing/fuzz.h"
#include "testing/limits.h"

namespace muster::store {
namespace {

using std::chrono::seconds;

// spec: R2 PMI gives the address: the words of its lines
TEST(LaunchExchange, ReadsPmiLines) {
  const auto words = parse_pmi_line("cmd=get_result rc=0 msg=success value=6e");
  ASSERT_TRUE(words.has_value());
  EXPECT_EQ(words->at("cmd"), "get_result");
  EXPECT_EQ(words->at("value"), "6e");
  EXPECT_TRUE(parse_pmi_line("cmd=barrier_out ").has_value());
  for (const char* wrong : {"", " ", "barrier_out", "=x cmd=y", "rc=0"})
    EXPECT_FALSE(parse_pmi_line(wrong).has_value()) << wrong;
}

TEST(LaunchExchangeFuzz, AnyLineIsReadOrRefused) {
  testing::Fuzz fuzz(81);
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const auto words = parse_pmi_line(fuzz.babble(40, "cmd= rx\n"));
    if (words) {
      EXPECT_TRUE(words->contains("cmd"));
    }
  }
}

/// Serves one rank as Hydra does, with line ends where the stream happens to be cut.
void serve(int descriptor) {
  std::string held, value;
  char bytes[64];
  for (ssize_t got = 0; (got = ::read(descriptor, bytes, sizeof bytes)) > 0;) {
    held.append(bytes, static_cast<std::size_t>(got));
    for (std::size_t end = 0; (end = held.find('\n')) != std::string::npos;
         held.erase(0, end + 1)) {
      const auto words = *parse_pmi_line(held.substr(0, end));
      std::string answer = "cmd=barrier_out\n";
      if (words.at("cmd") == "init")
        answer = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
      if (words.at("cmd") == "get_my_kvsname") answer = "cmd=my_kvsname kvsname=kvs_1\n";
      if (words.at("cmd") == "put") {
        value = words.at("value");
        answer = "cmd=put_result rc=0 msg=success\n";
      }
      if (words.at("cmd") == "get")
        answer = "cmd=get_result rc=0 msg=success value=" + value + "\n";
      for (const char each : answer) EXPECT_EQ(::write(descriptor, &each, 1), 1);
    }
  }
}

// spec: R2 PMI gives the address, again for each job of the same processes
TEST(LaunchExchange, SharesByPmi) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  ::setenv("PMI_FD", std::to_string(ends[0]).c_str(), 1);
  std::thread launcher([&] { serve(ends[1]); });
  const TimePoint deadline = deadline_after(steady_clock(), muster::testing::kMustHappen);
  for (const std::string& text : {std::string("10.0.0.1 29500 node0"), std::string("a\0b\n", 4)}) {
    const auto shared =
        share_from_rank_zero(SchedulerRanks::AddressExchange::pmi, 0, text, deadline);
    ASSERT_TRUE(shared.ok()) << shared.status().message();
    EXPECT_EQ(*shared, text);
  }
  ::shutdown(ends[0], SHUT_RDWR);
  launcher.join();
  ::close(ends[1]);
  const auto closed = share_from_rank_zero(SchedulerRanks::AddressExchange::pmi, 0, "x", deadline);
  EXPECT_EQ(closed.status().code(), Code::network);
  ::unsetenv("PMI_FD");
}

TEST(LaunchExchange, SaysThatALauncherSharesNothing) {
  EXPECT_EQ(share_from_rank_zero(SchedulerRanks::AddressExchange::none, 0, "x", TimePoint::max())
                .status()
                .code(),
            Code::unsupported);
}

}  // namespace
}  // namespace muster::store
