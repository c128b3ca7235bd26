// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/failure_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <map>
#include <vector>

namespace muster::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Blames = std::map<int, std::vector<int>>;

constexpr TimePoint kNow{seconds(1000)};

BlamedGroup failure_of(int members, Blames blamed, TimePoint since = kNow - seconds(10)) {
  BlamedGroup failure{.members = {}, .blamed = std::move(blamed), .since = since};
  for (int slot = 0; slot < members; ++slot) failure.members.push_back(slot);
  return failure;
}

/// The same pairs were blamed 20 s before.
BlamedGroup again(BlamedGroup failure) {
  for (const SlotPair& pair : all_blamed_pairs(failure.blamed))
    failure.before.push_back({pair, kNow - seconds(20)});
  return failure;
}

// spec: L15 nothing is decided before a death could be known, and a member that says nothing is
// waited for no longer than 1.5 s
TEST(FailureRule, WaitsForDeathsAndForReports) {
  const FailureOptions options;
  const TimePoint since = kNow;
  const auto verdict = [&](const Blames& blamed, Duration later) {
    return judge_failure(since + later, failure_of(2, blamed, since), options);
  };
  EXPECT_FALSE(verdict({}, seconds(100)).decided);
  EXPECT_EQ(verdict({{0, {1}}, {1, {0}}}, milliseconds(499)).again, since + milliseconds(500));
  EXPECT_TRUE(verdict({{0, {1}}, {1, {0}}}, milliseconds(500)).decided);
  EXPECT_EQ(verdict({{0, {1}}}, milliseconds(500)).again, since + milliseconds(1500));
  EXPECT_TRUE(verdict({{0, {1}}}, milliseconds(1500)).decided);
}

// spec: L15 where the service sees a death late a blamed member that says nothing is waited for: it
// may be dead
TEST(FailureRule, ABlamedMemberThatSaysNothingMayBeDead) {
  FailureOptions options;
  options.death_patience = seconds(7);
  const auto verdict = [&](const Blames& blamed, Duration later) {
    return judge_failure(kNow + later, failure_of(3, blamed, kNow), options);
  };
  const Blames silent{{0, {1}}, {2, {1}}}, another{{0, {2}}, {2, {0}}};
  EXPECT_EQ(verdict(silent, seconds(2)).again, kNow + seconds(7));
  EXPECT_TRUE(verdict(silent, seconds(7)).decided);
  EXPECT_TRUE(verdict(another, milliseconds(1500)).decided) << "no member blames the silent one";
  EXPECT_TRUE(verdict({{0, {1}}, {1, {0}}, {2, {}}}, milliseconds(500)).decided);
}

// spec: L15 a worker that has said that it ends is waited for, but not for ever
TEST(FailureRule, AnEndThatIsAnnouncedIsWaitedFor) {
  BlamedGroup failure = failure_of(2, {{0, {1}}, {1, {}}}, kNow);
  failure.ending = true;
  EXPECT_EQ(judge_failure(kNow + seconds(5), failure, {}).again, kNow + seconds(30));
  EXPECT_TRUE(judge_failure(kNow + seconds(30), failure, {}).decided);
}

// spec: L15 the only member with the job's state is not left out, however often it is blamed
TEST(FailureRule, TheOnlyHolderOfTheStateIsKept) {
  BlamedGroup two = again(failure_of(2, {{0, {1}}, {1, {0}}}));
  EXPECT_EQ(judge_failure(kNow, two, {}).left_out, std::vector<int>{1});
  two.needed = {1};
  EXPECT_EQ(judge_failure(kNow, two, {}).left_out, std::vector<int>{0});
  BlamedGroup five = again(failure_of(5, {{0, {2}}, {1, {2}}, {2, {0, 1}}, {3, {}}, {4, {}}}));
  EXPECT_EQ(judge_failure(kNow, five, {}).left_out, std::vector<int>{2});
  five.needed = {2};
  EXPECT_EQ(judge_failure(kNow, five, {}).left_out, std::vector<int>{1});
  BlamedGroup three = again(failure_of(3, {{0, {1}}, {1, {0, 2}}, {2, {1}}}));
  three.needed = {1};
  EXPECT_TRUE(judge_failure(kNow, three, {}).left_out.empty());
  EXPECT_TRUE(judge_failure(kNow, three, {}).counts_as_restart);
}

// spec: L15 members that have parts of a state which may lose none are kept: one without is left
// out, or the same members go on
TEST(FailureRule, MembersWithPartsThatMayNotBeLostAreKept) {
  BlamedGroup failure = again(failure_of(4, {{0, {1}}, {1, {0}}, {2, {}}, {3, {}}}));
  failure.needed = {0, 2, 3};
  EXPECT_EQ(judge_failure(kNow, failure, {}).left_out, std::vector<int>{1});
  failure.needed = {0, 1, 2, 3};
  EXPECT_TRUE(judge_failure(kNow, failure, {}).left_out.empty());
  EXPECT_TRUE(judge_failure(kNow, failure, {}).counts_as_restart);
}

// spec: L15 a first failure leaves no member out, nor does one whose like is long ago
TEST(FailureRule, TheFirstFailureIsChance) {
  BlamedGroup failure = failure_of(3, {{0, {1}}, {1, {0}}, {2, {}}});
  failure.committed = 1;
  for (const Duration ago : {seconds(0), seconds(60), seconds(600)}) {
    if (ago > Duration(0)) failure.before = {{{0, 1}, kNow - ago}};
    const FailureVerdict verdict = judge_failure(kNow, failure, {});
    EXPECT_TRUE(verdict.decided);
    EXPECT_TRUE(verdict.left_out.empty());
    EXPECT_FALSE(verdict.counts_as_restart);
  }
  failure.before = {{{0, 2}, kNow - seconds(1)}};
  EXPECT_TRUE(judge_failure(kNow, failure, {}).bad.empty()) << "another pair";
}

// spec: L15 however long ago the last failure is, a pair that fails again before another commit was
// made is bad
TEST(FailureRule, AFailureWithoutProgressIsNoChance) {
  BlamedGroup failure = failure_of(3, {{0, {1}}, {1, {0}}, {2, {}}});
  failure.before = {{{0, 1}, kNow - seconds(1800), 7}};
  failure.committed = 8;
  EXPECT_TRUE(judge_failure(kNow, failure, {}).bad.empty());
  failure.committed = 7;
  EXPECT_EQ(judge_failure(kNow, failure, {}).left_out, std::vector<int>{1});
}

// spec: L15 in a job that commits nothing only the time between two failures tells chance
TEST(FailureRule, AJobWithoutCommitsIsJudgedByTheTimeAlone) {
  BlamedGroup failure = failure_of(3, {{0, {1}}, {1, {0}}, {2, {}}});
  failure.before = {{{0, 1}, kNow - seconds(60), 0}};
  EXPECT_TRUE(judge_failure(kNow, failure, {}).bad.empty());
  EXPECT_TRUE(judge_failure(kNow, failure, {}).left_out.empty());
  EXPECT_TRUE(judge_failure(kNow, failure, {}).counts_as_restart) << "or it could go on for ever";
  failure.committed = 1;
  EXPECT_FALSE(judge_failure(kNow, failure, {}).counts_as_restart) << "it has made progress";
  failure.committed = 0;
  failure.before = {{{0, 1}, kNow - seconds(59), 0}};
  EXPECT_EQ(judge_failure(kNow, failure, {}).left_out, std::vector<int>{1});
  EXPECT_FALSE(judge_failure(kNow, failure, {}).counts_as_restart);
  failure.before = {{{0, 1}, kNow - seconds(60), 5}};
  EXPECT_EQ(judge_failure(kNow, failure, {}).left_out, std::vector<int>{1}) << "it had commits";
}

// spec: L15 a failure that no node is blamed for leaves no node out, and counts as a restart the
// second time
TEST(FailureRule, AFailureThatNobodyIsBlamedFor) {
  BlamedGroup failure = failure_of(3, {{0, {}}, {1, {}}, {2, {}}});
  EXPECT_FALSE(judge_failure(kNow, failure, {}).counts_as_restart);
  failure = again(failure);
  EXPECT_TRUE(judge_failure(kNow, failure, {}).counts_as_restart);
  EXPECT_TRUE(judge_failure(kNow, failure, {}).left_out.empty());
}

// spec: L15 a link that fails again costs the member that is blamed most, then the highest slot
TEST(FailureRule, ABadLinkCostsOneMember) {
  EXPECT_EQ(judge_failure(kNow, again(failure_of(3, {{0, {1}}, {1, {0}}, {2, {}}})), {}).left_out,
            std::vector<int>{1});
  EXPECT_EQ(judge_failure(kNow, again(failure_of(3, {{0, {1}}, {2, {1}}})), {}).left_out,
            std::vector<int>{1});
  // A rank that stood still names others when it goes on.
  EXPECT_EQ(
      judge_failure(kNow, again(failure_of(4, {{0, {1}}, {1, {0, 2, 3}}, {2, {1}}, {3, {1}}})), {})
          .left_out,
      std::vector<int>{1});
}

// spec: L15 never more than half of the members, nor below the least number, nor a node for trouble
// within itself: then the same members go on, which is a restart
TEST(FailureRule, WhatMayNotBeLeftOutIsARestart) {
  const auto verdict = [](const BlamedGroup& failure, std::size_t least) {
    FailureOptions options;
    options.least = least;
    return judge_failure(kNow, again(failure), options);
  };
  const Blames link{{0, {1}}, {1, {0}}};
  EXPECT_EQ(verdict(failure_of(2, link), 1).left_out, std::vector<int>{1});
  EXPECT_TRUE(verdict(failure_of(2, link), 2).counts_as_restart);
  FailureOptions majority;
  majority.majority = true;
  EXPECT_TRUE(judge_failure(kNow, again(failure_of(2, link)), majority).counts_as_restart);
  EXPECT_EQ(judge_failure(kNow, again(failure_of(3, link)), majority).left_out.size(), 1u);
  EXPECT_TRUE(verdict(failure_of(1, {{0, {0}}}), 1).counts_as_restart);
  EXPECT_TRUE(verdict(failure_of(3, {{0, {0}}, {1, {0}}, {2, {}}}), 1).counts_as_restart)
      << "by its own word the trouble is within it";
  const FailureVerdict most = verdict(failure_of(3, {{0, {1, 2}}, {1, {0, 2}}, {2, {0, 1}}}), 1);
  EXPECT_TRUE(most.left_out.empty());
  EXPECT_TRUE(most.counts_as_restart);
}

// spec: L15 a member that blames others is taken at its word about those that it does not blame
TEST(FailureRule, HearsayIsNoBlame) {
  // The link between 0 and 1 is bad; 2 heard of it from 0, and 3 from 1.
  const Blames blamed{{0, {1}}, {1, {0}}, {2, {1}}, {3, {0}}};
  EXPECT_EQ(blamed_pairs(blamed), (std::vector<SlotPair>{{0, 1}}));
  EXPECT_EQ(judge_failure(kNow, again(failure_of(4, blamed)), {}).left_out, std::vector<int>{1});
  EXPECT_EQ(blamed_pairs({{0, {1}}, {1, {2}}, {2, {0}}}).size(), 3u) << "all say another thing";
}

/// All that may be said of a link that is cut between two of these members: one of them finds it
/// and tells the others, which then close their connections to the other one; or both find it.
std::vector<Blames> words_of_a_cut_link(int members, SlotPair link) {
  std::vector<int> others;
  for (int slot = 0; slot < members; ++slot)
    if (slot != link.first && slot != link.second) others.push_back(slot);
  std::vector<Blames> words;
  const auto [one, other] = link;
  for (std::uint32_t set = 0; set < (1U << others.size()); ++set) {
    Blames both{{one, {other}}, {other, {one}}};
    Blames by_one{{one, {other}}, {other, {}}}, by_other{{one, {}}, {other, {one}}};
    for (std::size_t i = 0; i < others.size(); ++i) {
      const bool in_set = (set >> i & 1U) != 0;
      both[others[i]] = {in_set ? one : other};
      by_one[others[i]] = {other};
      by_other[others[i]] = {one};
      if (in_set) by_one[other].push_back(others[i]), by_other[one].push_back(others[i]);
    }
    words.insert(words.end(), {both, by_one, by_other});
  }
  return words;
}

// spec: L15 a link that is cut costs one of its two nodes the second time it is blamed, whichever
// of them finds it first, whatever the others hear, and whom one that all others gave up blames for
// it
TEST(FailureRule, ACutLinkCostsOneOfItsNodesTheSecondTime) {
  for (int members = 3; members <= 5; ++members)
    for (int one = 0; one < members; ++one)
      for (int other = one + 1; other < members; ++other) {
        const auto words = words_of_a_cut_link(members, {one, other});
        for (const Blames& before : words)
          for (const Blames& now : words) {
            BlamedGroup failure = again(failure_of(members, before));
            failure.blamed = now;
            const std::vector<int> left_out = judge_failure(kNow, failure, {}).left_out;
            ASSERT_EQ(left_out.size(), 1u);
            ASSERT_TRUE(left_out[0] == one || left_out[0] == other) << left_out[0];
          }
      }
}

/// Among the sets that have one of each pair the smallest size.
int smallest_size(int nodes, const std::vector<SlotPair>& pairs) {
  int best = nodes;
  for (std::uint32_t set = 0; set < (1U << nodes); ++set) {
    const bool covers = std::ranges::all_of(pairs, [&](const SlotPair& pair) {
      return (set >> pair.first & 1U) != 0 || (set >> pair.second & 1U) != 0;
    });
    if (covers) best = std::min(best, std::popcount(set));
  }
  return best;
}

void check_graph(int nodes, const std::vector<SlotPair>& pairs) {
  Blames blamed;
  for (int slot = 0; slot < nodes; ++slot) blamed[slot];
  for (const auto& [one, other] : pairs) {
    blamed[one].push_back(other);
    blamed[other].push_back(one);
  }
  ASSERT_EQ(blamed_pairs(blamed), pairs.empty() ? std::vector{kNobody} : pairs);
  BlamedGroup failure = failure_of(nodes, blamed);
  EXPECT_TRUE(judge_failure(kNow, failure, {}).left_out.empty());
  failure = again(std::move(failure));
  const FailureVerdict verdict = judge_failure(kNow, failure, {});
  // Another node has heard the same in another order.
  for (auto& [slot, others] : failure.blamed) std::ranges::reverse(others);
  std::ranges::reverse(failure.before);
  std::ranges::reverse(failure.members);
  const FailureVerdict other = judge_failure(kNow, failure, {});
  EXPECT_EQ(other.left_out, verdict.left_out);
  EXPECT_EQ(other.counts_as_restart, verdict.counts_as_restart);
  const int smallest = smallest_size(nodes, pairs);
  if (2 * smallest > nodes || pairs.empty()) {
    EXPECT_TRUE(verdict.left_out.empty());
    EXPECT_TRUE(verdict.counts_as_restart);
    return;
  }
  // The bad links of the rest fail again, until the rest is connected.
  for (int left = smallest; left > 0; --left) {
    const FailureVerdict next = judge_failure(kNow, failure, {});
    ASSERT_EQ(next.left_out.size(), 1u) << left << " are to go";
    std::erase(failure.members, next.left_out[0]);
    std::erase_if(failure.blamed, [&](const auto& each) { return each.first == next.left_out[0]; });
    for (auto& [slot, others] : failure.blamed) std::erase(others, next.left_out[0]);
  }
  for (const auto& [slot, others] : failure.blamed)
    EXPECT_TRUE(others.empty()) << "the rest cannot all reach each other";
}

// spec: L15 for every graph of bad links of up to 6 nodes: one node is left out in each epoch, as
// many as the smallest set has, then the rest is connected; all nodes that have heard the same
// decide the same
TEST(FailureRule, EveryGraphOfSixNodes) {
  for (int nodes = 1; nodes <= 6; ++nodes) {
    std::vector<SlotPair> links;
    for (int one = 0; one < nodes; ++one)
      for (int other = one + 1; other < nodes; ++other) links.emplace_back(one, other);
    for (std::uint32_t graph = 0; graph < (1U << links.size()); ++graph) {
      std::vector<SlotPair> pairs;
      for (std::size_t i = 0; i < links.size(); ++i)
        if ((graph >> i & 1U) != 0) pairs.push_back(links[i]);
      check_graph(nodes, pairs);
      if (HasFailure()) FAIL() << "graph " << graph << " of " << nodes << " nodes";
    }
  }
}

// spec: L15 with more nodes than sets can be tried for, the rest is connected all the same
TEST(FailureRule, ManyBadLinks) {
  std::vector<SlotPair> pairs;
  for (int slot = 1; slot < 40; ++slot) pairs.emplace_back(slot - 1, slot);
  const std::vector<int> cover = smallest_cover(pairs, {});
  EXPECT_LE(cover.size(), 26u);
  for (const auto& [one, other] : pairs)
    EXPECT_TRUE(std::ranges::count(cover, one) + std::ranges::count(cover, other) > 0);
}

}  // namespace
}  // namespace muster::membership
