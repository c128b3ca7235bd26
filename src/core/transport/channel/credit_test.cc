// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/credit.h"

#include <gtest/gtest.h>

namespace muster::transport {
namespace {

TEST(Credit, GoesBackAQuarterAtATime) {
  CreditState receiver;
  const std::size_t quarter = kEagerCredit / 4;
  receiver.hold(quarter - 1);
  EXPECT_FALSE(receiver.take(quarter - 1));
  receiver.hold(1);
  EXPECT_TRUE(receiver.take(1)) << "a quarter is due";
  EXPECT_EQ(receiver.eager_due, quarter);
  EXPECT_EQ(receiver.envelopes_due, 2u);
  receiver.give_back();
  EXPECT_EQ(receiver.eager_held, 0u);
  EXPECT_EQ(receiver.envelopes_held, 0u);
}

TEST(Credit, AReceiverAllowsWhatASenderMaySpend) {
  CreditState sender, receiver;
  for (std::uint32_t sent = 0; sent < kEnvelopeCredit; ++sent) {
    ASSERT_GT(sender.envelopes_left, 0u);
    sender.spend(0);
    ASSERT_TRUE(receiver.allows(0));
    receiver.hold(0);
  }
  EXPECT_EQ(sender.envelopes_left, 0u);
  EXPECT_FALSE(receiver.allows(0)) << "one more overdraws";
}

TEST(Credit, NoMoreComesBackThanWasSpent) {
  CreditState sender;
  EXPECT_FALSE(sender.refill(1, 0));
  sender.spend(100);
  EXPECT_FALSE(sender.refill(1, 101));
  EXPECT_FALSE(sender.refill(~std::uint64_t{0}, 0)) << "a peer's word";
  EXPECT_TRUE(sender.refill(1, 100));
  EXPECT_EQ(sender.eager_left, kEagerCredit);
  EXPECT_EQ(sender.envelopes_left, kEnvelopeCredit);
}

TEST(CreditTable, FindsEveryPeerAgainUntilItIsCleared) {
  CreditTable table;
  table.with(1).spend(10);
  table.with(2).spend(20);
  EXPECT_EQ(table.with(1).eager_left, kEagerCredit - 10);
  EXPECT_EQ(table.with(2).eager_left, kEagerCredit - 20);
  table.clear();
  EXPECT_EQ(table.with(2).eager_left, kEagerCredit);
}

}  // namespace
}  // namespace muster::transport
