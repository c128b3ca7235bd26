// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/call_comparator.h"

#include <gtest/gtest.h>

namespace muster::transport {
namespace {

Fingerprint call(std::uint64_t sequence, std::uint8_t op) {
  Fingerprint made;
  made.sequence = sequence;
  made.op = op;
  return made;
}

TEST(CallComparator, NamesBothCallsAndBothRanks) {
  CallComparator calls(nullptr, 1);
  EXPECT_TRUE(calls.begin(call(1, 4)).empty());
  EXPECT_TRUE(calls.check(0, call(1, 4)).ok());
  const Status wrong = calls.check(0, call(1, 5));
  EXPECT_EQ(wrong.code(), Code::mismatch);
  EXPECT_EQ(wrong.ranks(), (std::vector<int>{0, 1}));
  EXPECT_NE(wrong.message().find("rank 0 called operation 5"), std::string::npos)
      << wrong.message();
  EXPECT_NE(wrong.message().find("rank 1 called operation 4"), std::string::npos)
      << wrong.message();
}

TEST(CallComparator, KeepsCallsThatCameBeforeOurs) {
  CallComparator calls(nullptr, 1);
  EXPECT_TRUE(calls.check(0, call(3, 4)).ok()) << "nothing to compare with yet";
  EXPECT_TRUE(calls.check(2, call(3, 5)).ok());
  EXPECT_TRUE(calls.check(2, call(3, 4)).ok()) << "the first of a rank counts";
  const auto early = calls.begin(call(3, 4));
  ASSERT_EQ(early.size(), 2u);
  EXPECT_EQ(early[0].first, 0);
  EXPECT_TRUE(calls.check(early[0].first, early[0].second).ok());
  EXPECT_FALSE(calls.check(early[1].first, early[1].second).ok());
  EXPECT_TRUE(calls.begin(call(3, 4)).empty()) << "told once";
}

TEST(CallComparator, RemembersTheLatestCallsAlone) {
  CallComparator calls(nullptr, 0);
  for (std::uint64_t sequence = 1; sequence <= 200; ++sequence)
    EXPECT_TRUE(calls.begin(call(sequence, 4)).empty());
  EXPECT_FALSE(calls.check(1, call(200, 5)).ok());
  EXPECT_FALSE(calls.check(1, call(73, 5)).ok());
  EXPECT_TRUE(calls.check(1, call(72, 5)).ok()) << "long over";
}

}  // namespace
}  // namespace muster::transport
