// SPDX-License-Identifier: BSD-3-Clause
// Records that lie in a store: damaged ones are refused or read, and never more.

#include <gtest/gtest.h>

#include "core/store/server/lease_table.h"
#include "jobs/membership/job_view.h"
#include "jobs/membership/membership.h"
#include "testing/fuzz.h"

namespace muster::membership {
namespace {

TEST(MembershipFuzz, DamagedRecordsAreReadOrRefused) {
  Epoch whole{4, JobState::running, 1, 0, "why", {{0, "node/a", "1"}, {2, "node/b", "2"}}};
  whole.blames = {{0, 2, 7, std::chrono::seconds(1)}, {}};
  whole.left_out = {{"c", std::chrono::seconds(2)}};
  whole.troubles = {{"a host", std::chrono::seconds(3)}};
  whole.committed = 650;
  whole.lost_in = 3;
  whole.state_in = 2;
  whole.state_divided = true;
  whole.parts_gone = 1;
  whole.keepers = {{"d", "another host", 2, std::chrono::seconds(4)}};
  EXPECT_EQ(decode_epoch(encode(whole)).value(), whole);
  const std::string epoch = encode(whole);
  const std::string report = encode(NodeReport{NodePhase::failed, 3, 1, 7, "host", "why", "more"});
  const std::string news = store::encode(store::LeaseNews{
      true, {{store::LeaseNews::Item::Kind::held, "node/a", 7, report}, {{}, "node/b", 0, ""}}});
  muster::testing::Fuzz fuzz(1);
  for (muster::testing::FuzzRun run(3000); run.goes_on();) {
    const auto read = decode_epoch(fuzz.damaged(epoch));
    if (read) {
      EXPECT_GE(read->number, 1);
      EXPECT_TRUE(decode_epoch(encode(*read)).ok());
    } else {
      EXPECT_FALSE(read.status().message().empty());
    }
    const auto said = decode_report(fuzz.damaged(report));
    EXPECT_TRUE(said.ok() ? said->wanted_slot >= -1 : !said.status().message().empty());
    const auto told = store::decode_lease_news(fuzz.damaged(news));
    EXPECT_TRUE(told.ok() || !told.status().message().empty());
  }
}

TEST(MembershipFuzz, AFailureLongerAgoThanAnyJobRunsIsRefused) {
  for (const Duration ago : {Duration::max(), Duration(std::chrono::hours(24 * 366 * 11))}) {
    Epoch epoch{4, JobState::running, 1, 0, "why", {}};
    epoch.blames = {{0, 2, 7, ago}};
    EXPECT_FALSE(decode_epoch(encode(epoch)).ok());
    epoch.blames = {};
    epoch.left_out = {{"c", ago}};
    EXPECT_FALSE(decode_epoch(encode(epoch)).ok());
    epoch.left_out = {};
    epoch.troubles = {{"a host", ago}};
    EXPECT_FALSE(decode_epoch(encode(epoch)).ok());
    epoch.troubles = {};
    epoch.keepers = {{"d", "a host", 2, ago}};
    EXPECT_FALSE(decode_epoch(encode(epoch)).ok());
    epoch.keepers = {};
    epoch.troubles = {{"a host", std::chrono::hours(24 * 365)}};
    EXPECT_TRUE(decode_epoch(encode(epoch)).ok());
  }
}

}  // namespace
}  // namespace muster::membership
