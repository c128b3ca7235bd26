// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/message_matcher.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>

namespace muster::transport {
namespace {

std::shared_ptr<TransferState> receive_from(int rank, std::uint64_t tag, std::uint64_t order) {
  auto transfer = std::make_shared<TransferState>();
  transfer->rank = rank;
  transfer->key = MatchKey{rank, 0, tag};
  transfer->order = order;
  return transfer;
}

std::unique_ptr<Envelope> message_from(int rank, std::uint64_t tag) {
  auto envelope = std::make_unique<Envelope>();
  envelope->key = MatchKey{rank, 0, tag};
  return envelope;
}

TEST(MessageMatcher, GivesAMessageToTheReceivePostedFirst) {
  RankStates ranks(3);
  MessageMatcher matcher(ranks);
  const auto any = receive_from(-1, 7, matcher.next_order());
  const auto one = receive_from(1, 7, matcher.next_order());
  matcher.post(*any);
  matcher.post(*one);
  EXPECT_EQ(ranks.posted_from(1), 1) << "a receive from any waits for nobody in particular";
  EXPECT_EQ(matcher.match(MatchKey{1, 0, 7}), any);
  EXPECT_EQ(any->from, 1);
  EXPECT_EQ(matcher.match(MatchKey{2, 0, 7}), nullptr);
  EXPECT_EQ(matcher.match(MatchKey{1, 0, 7}), one);
  EXPECT_EQ(ranks.posted_from(1), 0);
}

TEST(MessageMatcher, ACollectivesMessageMatchesNoReceiveFromAny) {
  RankStates ranks(2);
  MessageMatcher matcher(ranks);
  const auto any = receive_from(-1, 7, matcher.next_order());
  matcher.post(*any);
  EXPECT_EQ(matcher.match(MatchKey{1, 5, 7}), nullptr);
  matcher.withdraw(*any);
  EXPECT_EQ(matcher.match(MatchKey{1, 0, 7}), nullptr) << "taken back";
}

TEST(MessageMatcher, AReceiveFromAnyTakesTheMessageThatCameFirst) {
  RankStates ranks(3);
  MessageMatcher matcher(ranks);
  const std::array members{0, 1, 2};
  matcher.keep(message_from(2, 7));
  matcher.keep(message_from(1, 7));
  const auto any = receive_from(-1, 7, matcher.next_order());
  EXPECT_FALSE(matcher.is_untouched(MatchKey{1, 0, 7}));
  EXPECT_EQ(matcher.take_for(*any, members)->key.source, 2);
  EXPECT_EQ(matcher.take_for(*any, members)->key.source, 1);
  EXPECT_EQ(matcher.take_for(*any, members), nullptr);
  EXPECT_TRUE(matcher.is_untouched(MatchKey{1, 0, 7}));
}

}  // namespace
}  // namespace muster::transport
