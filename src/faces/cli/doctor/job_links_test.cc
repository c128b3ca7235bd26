// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/job_links.h"

#include <gtest/gtest.h>

#include <chrono>

namespace muster::cli {
namespace {

/// Ranks 2 h and 2 h + 1 are on host h.
trace::AskedJob job_on(int hosts) {
  trace::AskedJob job;
  for (int rank = 0; rank < 2 * hosts; ++rank) {
    trace::RankTrace trace;
    trace.rank = rank;
    trace.host = "node" + std::to_string(rank / 2);
    trace.boot = "boot";
    job.job.ranks.push_back(trace);
  }
  return job;
}

LinkFigures figures(int us, std::uint64_t bytes_per_s, std::uint64_t sent = 1 << 20,
                    std::uint64_t resent = 0) {
  return {.round_trip = std::chrono::microseconds(us),
          .bytes_per_s = bytes_per_s,
          .sent = sent,
          .resent = resent};
}

// spec: X4.links the best that ranks of two hosts have measured, and links within a host left out
TEST(JobLinks, AreThoseBetweenHosts) {
  trace::AskedJob job = job_on(2);
  job.links[{0, 1}] = figures(5, 1'000'000'000);
  job.links[{0, 2}] = figures(20'000, 1'000'000);
  job.links[{1, 2}] = figures(30'000, 1'250'000, 3 << 20, 1 << 20);
  job.links[{1, 3}] = figures(40'000, 9'000'000, 1000);
  job.links[{2, 9}] = figures(1, 1);
  const HostLinks found = links_between_hosts(job);
  EXPECT_EQ(found.hosts,
            (std::vector<std::string>{"node0 (ranks 0 and 1)", "node1 (ranks 2 and 3)"}));
  ASSERT_EQ(found.links.size(), 1u);
  EXPECT_EQ(found.links[0].from, 0u);
  EXPECT_EQ(found.links[0].to, 1u);
  EXPECT_DOUBLE_EQ(found.links[0].round_trip_ms, 20);
  EXPECT_DOUBLE_EQ(found.links[0].mbit_per_s, 10) << "a thousand bytes tell no rate";
  EXPECT_NEAR(found.links[0].resent, 0.25, 0.01);
  const auto lines = describe(found);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_NE(lines[2].find("10 (20)"), std::string::npos) << lines[2];
  EXPECT_TRUE(lines[2].ends_with("node0 (ranks 0 and 1)")) << lines[2];
}

// spec: X4.links a round trip that is not known is none of 0
TEST(JobLinks, MayHaveNoRoundTripYet) {
  trace::AskedJob job = job_on(2);
  job.links[{0, 2}] = figures(0, 1'250'000);
  EXPECT_NE(describe(links_between_hosts(job))[2].find("10 (?)"), std::string::npos);
  job.links[{1, 3}] = figures(30'000, 1'250'000);
  EXPECT_DOUBLE_EQ(links_between_hosts(job).links[0].round_trip_ms, 30);
  job.links[{1, 2}] = figures(0, 1'250'000);
  EXPECT_DOUBLE_EQ(links_between_hosts(job).links[0].round_trip_ms, 30);
}

// spec: X4.links many hosts: the slowest links
TEST(JobLinks, OfManyHostsAreTheSlowest) {
  trace::AskedJob job = job_on(20);
  for (int host = 0; host < 20; ++host)
    job.links[{2 * host, 2 * ((host + 1) % 20)}] =
        figures(100, static_cast<std::uint64_t>(20 - host) * 1'000'000);
  const auto lines = describe(links_between_hosts(job));
  ASSERT_EQ(lines.size(), 13u);
  EXPECT_NE(lines[1].find("8 (0.1) from node19 (ranks 38 and 39) to node0"), std::string::npos)
      << lines[1];
}

// spec: X4.links where another order of the hosts makes a faster ring, it is named
TEST(JobLinks, NameTheOrderOfTheFastestRing) {
  HostLinks links;
  links.hosts = {"a", "b", "c", "d"};
  for (std::size_t from = 0; from < 4; ++from) {
    for (std::size_t to = 0; to < 4; ++to)
      if (from != to)
        links.links.push_back({.from = from,
                               .to = to,
                               .round_trip_ms = from + to == 1 ? 80.0 : 1.0,
                               .mbit_per_s = from + to == 1 ? 10.0 : 1000.0});
  }
  EXPECT_EQ(ring_of(links), (std::vector<std::size_t>{0, 2, 1, 3}));
  EXPECT_NE(describe(links).back().find("in the order 0 2 1 3"), std::string::npos);
  links.links.pop_back();
  EXPECT_EQ(ring_of(links), std::nullopt);
  EXPECT_EQ(describe(links).size(), 6u);
}

TEST(JobLinks, MayNotBeThere) {
  EXPECT_EQ(describe(links_between_hosts(job_on(1))).size(), 1u);
  EXPECT_EQ(describe(links_between_hosts(job_on(2)))[0],
            "no rank has used a link to another host yet");
}

}  // namespace
}  // namespace muster::cli
