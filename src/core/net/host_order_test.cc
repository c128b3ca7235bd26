// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/host_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "testing/seed.h"

namespace muster {
namespace {

using Order = std::vector<std::size_t>;

/// Hosts of sites: fast within a site, slow between two.
std::vector<HostHop> hops_of(const std::vector<int>& site_of) {
  std::vector<HostHop> hops;
  for (const int from : site_of) {
    for (const int to : site_of)
      hops.push_back(from == to ? HostHop{1e8, std::chrono::microseconds(200)}
                                : HostHop{1e6, std::chrono::microseconds(50'000)});
  }
  return hops;
}

Order numbers(std::size_t hosts) {
  Order order(hosts);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

// A slow link between two hosts is left out of the ring.
TEST(HostOrder, LeavesOutTheSlowLinks) {
  std::vector<HostHop> hops(16, HostHop{1e8, std::chrono::microseconds(100)});
  hops[0 * 4 + 1].bytes_per_s = hops[1 * 4 + 0].bytes_per_s = 1e6;
  const auto order = ring_order(hops, 4);
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(*order, (Order{0, 2, 1, 3}));
  EXPECT_EQ(slowest_hop(hops, *order), 1e8);
  EXPECT_EQ(slowest_hop(hops, numbers(4)), 1e6);
}

// Each direction of a link counts for itself.
TEST(HostOrder, GoesTheFastWayAround) {
  std::vector<HostHop> hops(9, HostHop{1e8});
  hops[0 * 3 + 1].bytes_per_s = hops[1 * 3 + 2].bytes_per_s = hops[2 * 3 + 0].bytes_per_s = 1e6;
  EXPECT_EQ(ring_order(hops, 3), (Order{0, 2, 1}));
}

// No figures, or none that make a difference: the order stays.
TEST(HostOrder, StaysWithoutFigures) {
  std::vector<HostHop> hops(16, HostHop{1e8});
  EXPECT_EQ(ring_order(hops, 4), std::nullopt) << "all are as fast";
  hops[1].bytes_per_s = 0.95e8;
  EXPECT_EQ(ring_order(hops, 4), std::nullopt) << "as fast as measuring can tell";
  hops[1].bytes_per_s = 1e6;
  EXPECT_TRUE(ring_order(hops, 4).has_value());
  hops[2 * 4 + 3].bytes_per_s = 0;
  EXPECT_EQ(ring_order(hops, 4), std::nullopt) << "one is not known";
  EXPECT_EQ(ring_order({}, 0), std::nullopt);
  EXPECT_EQ(ring_order(std::vector<HostHop>(4, HostHop{1e8}), 2), std::nullopt);
  EXPECT_EQ(ring_order(std::vector<HostHop>(9, HostHop{1e8}), 4), std::nullopt);
}

// Hosts of one site stand together: few hops go between sites.
TEST(HostOrder, KeepsSitesTogether) {
  EXPECT_EQ(ring_order(hops_of({0, 1, 0, 1}), 4), (Order{0, 1, 3, 2})) << "2 is followed by 0";
  EXPECT_EQ(ring_order(hops_of({0, 0, 1, 1}), 4), std::nullopt) << "they do";
  auto hops = hops_of({0, 1, 0, 1});
  hops[6].round_trip = {};
  EXPECT_EQ(ring_order(hops, 4), std::nullopt) << "a way is not known, and the rates are alike";
}

// Every host once, beginning with the first, and no worse than before.
TEST(HostOrder, IsAnOrderOfAllHosts) {
  std::mt19937_64 random(testing::test_seed());
  std::uniform_real_distribution<double> rates(1e6, 1e9);
  for (const std::size_t hosts : {3u, 5u, 8u, 9u, 30u}) {
    std::vector<HostHop> hops(hosts * hosts);
    for (HostHop& hop : hops) hop = {rates(random), std::chrono::microseconds(random() % 1000)};
    const auto order = ring_order(hops, hosts);
    EXPECT_EQ(order, ring_order(hops, hosts)) << "the same everywhere";
    if (!order) continue;
    EXPECT_EQ(order->front(), 0u);
    EXPECT_GE(1.11 * slowest_hop(hops, *order), slowest_hop(hops, numbers(hosts)));
    Order sorted = *order;
    std::ranges::sort(sorted);
    EXPECT_EQ(sorted, numbers(hosts));
  }
}

// Many hosts: one slow link is avoided.
TEST(HostOrder, AvoidsASlowLinkAmongMany) {
  constexpr std::size_t kHosts = 20;
  std::vector<HostHop> hops(kHosts * kHosts, HostHop{1e8});
  hops[7 * kHosts + 8].bytes_per_s = 1e6;
  const auto order = ring_order(hops, kHosts);
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(slowest_hop(hops, *order), 1e8);
}

}  // namespace
}  // namespace muster
