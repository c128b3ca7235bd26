// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/creation/link_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/collective/creation/group_creation.h"
#include "core/collective/testing/communicator_job.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

/// Members on sites: fast within a site, slow and far between two.
LinkReport report_of(int member, const std::vector<int>& sites) {
  LinkReport report{.strands = 5, .hops = {}};
  for (std::size_t other = 0; other < sites.size(); ++other) {
    const bool is_near = sites[other] == sites[static_cast<std::size_t>(member)];
    report.hops[other] = is_near ? LinkReport::HopClass{.rate = 200, .round_trip = 50}
                                 : LinkReport::HopClass{.rate = 150, .round_trip = 120};
  }
  return report;
}

std::vector<LinkReport> reports_of(const std::vector<int>& sites) {
  std::vector<LinkReport> reports;
  for (std::size_t i = 0; i < sites.size(); ++i)
    reports.push_back(report_of(static_cast<int>(i), sites));
  return reports;
}

using Places = std::vector<std::uint8_t>;

// spec: X4.order the members of a site follow each other
TEST(LinkReport, OrdersMembersByTheirRates) {
  auto reports = reports_of({0, 1, 0, 1});
  EXPECT_EQ(places_of(order_by_rates(reports), 4), (Places{0, 1, 3, 2}));
  EXPECT_EQ(most_strands(reports), 5u);

  EXPECT_EQ(order_by_rates(reports_of({0, 0, 1, 1})), MemberOrder{}) << "they do";
  for (LinkReport& each : reports) each.strands = 1;
  EXPECT_EQ(order_by_rates(reports), MemberOrder{}) << "the way is short";
  reports = reports_of({0, 1, 0, 1});
  reports[3].hops[0].rate = 0;
  EXPECT_EQ(order_by_rates(reports), MemberOrder{}) << "one rate is not known";
  const std::vector<LinkReport> crowd(kMostOrdered + 1, report_of(0, {0, 1}));
  EXPECT_EQ(order_by_rates(crowd), MemberOrder{}) << "more than a note has room for";
}

// Whatever a note says, plans get an order of all members, or none.
TEST(LinkReport, OrderIsOfAllMembers) {
  EXPECT_EQ(places_of({}, 1), Places{});
  EXPECT_EQ(places_of({}, 2), Places{});
  EXPECT_EQ(places_of({1, 0, 2}, 3), (Places{1, 0, 2}));
  EXPECT_EQ(places_of({1, 0, 1}, 3), Places{});
  EXPECT_EQ(places_of({1, 0, 3}, 3), Places{});
  EXPECT_EQ(places_of({1, 0, 2}, static_cast<int>(kMostOrdered) + 1), Places{});
}

// spec: X4.order all members of a group have the order that follows from all their reports
TEST(LinkReport, MembersAgreeOnTheOrder) {
  run_ranks(4, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const std::vector<int> members{3, 1, 2, 0};
    const std::vector<int> sites{0, 1, 0, 1};  // by member
    const int self = static_cast<int>(std::ranges::find(members, rank) - members.begin());
    const auto agreed = agree(
        *fabric, members, "ordered", 0, soon(),
        []() -> Result<GroupDescriptor> {
          GroupDescriptor descriptor;
          descriptor.segment = kNoSegment;
          return descriptor;
        },
        {}, {}, [&] { return report_of(self, sites); });
    ASSERT_TRUE(agreed.ok()) << agreed.status().message();
    const GroupPlacement placement = placement_of(*fabric, members, agreed->descriptor);
    EXPECT_EQ(placement.order, (Places{0, 1, 3, 2}));
    EXPECT_EQ(placement.strands, 5u);
  });
}

}  // namespace
}  // namespace muster::collective
