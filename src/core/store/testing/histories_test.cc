// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/testing/histories.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace muster::store {
namespace {

Call call(Act act, std::int64_t argument, std::int64_t result, std::int64_t begin,
          std::int64_t end) {
  Call made{.act = act, .ending = Ending::answered, .argument = argument, .result = result};
  made.begin = begin;
  made.end = end;
  return made;
}

Call unanswered(Act act, std::int64_t argument, std::int64_t begin) {
  Call made{.act = act, .argument = argument};
  made.begin = begin;
  return made;
}

bool linearizable(const std::vector<Call>& calls) { return !why_not_linearizable(calls); }

TEST(Histories, ACallSeesWhatEndedBeforeItBegan) {
  EXPECT_TRUE(linearizable({call(Act::set, 1, 0, 0, 1), call(Act::get, 0, 1, 2, 3)}));
  EXPECT_FALSE(linearizable(
      {call(Act::set, 1, 0, 0, 1), call(Act::set, 2, 0, 2, 3), call(Act::get, 0, 1, 4, 5)}));
}

TEST(Histories, OverlappingCallsHaveEitherOrder) {
  for (const std::int64_t seen : {1, 2})
    EXPECT_TRUE(linearizable({call(Act::set, 1, 0, 0, 10), call(Act::set, 2, 0, 5, 15),
                              call(Act::get, 0, seen, 20, 21)}));
  // Both readers cannot have seen the new value first and the old one later.
  EXPECT_FALSE(linearizable({call(Act::set, 1, 0, 0, 1), call(Act::set, 2, 0, 2, 20),
                             call(Act::get, 0, 2, 3, 4), call(Act::get, 0, 1, 5, 6)}));
}

TEST(Histories, AnUnansweredCallTakesEffectOnceOrNever) {
  for (const std::int64_t seen : {1, 2})
    EXPECT_TRUE(linearizable(
        {call(Act::set, 1, 0, 0, 1), unanswered(Act::add, 1, 2), call(Act::get, 0, seen, 3, 4)}));
  EXPECT_FALSE(linearizable(
      {call(Act::set, 1, 0, 0, 1), unanswered(Act::add, 1, 2), call(Act::get, 0, 3, 3, 4)}));
  EXPECT_FALSE(linearizable({unanswered(Act::set, 5, 10), call(Act::get, 0, 5, 1, 2)}))
      << "an effect before its cause";
}

TEST(Histories, AnElementLeavesAQueueOnceAndInOrder) {
  const std::vector<Call> pushed = {call(Act::push, 1, 0, 0, 1), call(Act::push, 2, 0, 2, 3)};
  const auto with = [&](std::vector<Call> more) {
    more.insert(more.begin(), pushed.begin(), pushed.end());
    return linearizable(more);
  };
  EXPECT_TRUE(with({call(Act::pop, 0, 1, 4, 5), call(Act::pop, 0, 2, 6, 7)}));
  EXPECT_FALSE(with({call(Act::pop, 0, 2, 4, 5), call(Act::pop, 0, 1, 6, 7)}));
  EXPECT_FALSE(with({call(Act::pop, 0, 1, 4, 5), call(Act::pop, 0, 1, 6, 7)}));
  EXPECT_FALSE(with({call(Act::pop, 0, 1, 4, 5), call(Act::pop, 0, 0, 6, 7)})) << "one is lost";
  EXPECT_TRUE(with({unanswered(Act::pop, 0, 3), call(Act::pop, 0, 2, 6, 7)}));
  EXPECT_FALSE(with({call(Act::length, 0, 1, 4, 5)}));
}

TEST(Histories, OneChangeOfTheExpectedValueWins) {
  std::vector<Call> calls = {call(Act::set, 1, 0, 0, 1)};
  for (const std::int64_t wanted : {2, 3}) {
    calls.push_back(call(Act::compare_set, wanted, wanted, 2, 9));
    calls.back().expected = 1;
  }
  EXPECT_FALSE(linearizable(calls));
  calls.back().result = 2;
  EXPECT_TRUE(linearizable(calls));
}

/// The explanation by trying every order, for small histories.
bool explained_by_some_order(std::vector<Call> calls) {
  std::sort(calls.begin(), calls.end(),
            [](const Call& a, const Call& b) { return a.begin < b.begin; });
  std::vector<int> order(calls.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  do {
    bool holds = true;
    std::int64_t value = 0;
    for (std::size_t i = 0; i < order.size() && holds; ++i) {
      const Call& one = calls[static_cast<std::size_t>(order[i])];
      for (std::size_t j = i + 1; j < order.size(); ++j)
        holds = holds && calls[static_cast<std::size_t>(order[j])].end >= one.begin;
      if (one.act == Act::add) value += one.argument;
      holds = holds && one.result == value;
    }
    if (holds) return true;
  } while (std::next_permutation(order.begin(), order.end()));
  return false;
}

TEST(Histories, TheSearchAgreesWithTryingEveryOrder) {
  std::mt19937_64 random(7);
  int right = 0, wrong = 0;
  for (int round = 0; round < 4000; ++round) {
    std::vector<Call> calls;
    for (int i = 0; i < 5; ++i) {
      const auto begin = static_cast<std::int64_t>(random() % 20);
      const auto end = begin + 1 + static_cast<std::int64_t>(random() % 12);
      const auto told = static_cast<std::int64_t>(1 + random() % 3);
      calls.push_back(random() % 2 == 0 ? call(Act::add, 1, told, begin, end)
                                        : call(Act::get, 0, told, begin, end));
    }
    const bool expected = explained_by_some_order(calls);
    ASSERT_EQ(linearizable(calls), expected) << "round " << round;
    ++(expected ? right : wrong);
  }
  EXPECT_GT(right, 20);
  EXPECT_GT(wrong, 1000);
}

}  // namespace
}  // namespace muster::store
