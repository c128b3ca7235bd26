// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/failure_rule.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <set>

namespace muster::membership {
namespace {

constexpr std::size_t kMostExact = 16;  // limit: 65536 sets are tried

SlotPair pair_of(int one, int other) { return {std::min(one, other), std::max(one, other)}; }

bool blames(const std::vector<int>& blamed, int slot) {
  return std::ranges::count(blamed, slot) > 0;
}

/// How often members other than itself blame a slot.
int weight_of(int slot, const std::map<int, std::vector<int>>& blamed) {
  return static_cast<int>(std::ranges::count_if(blamed, [&](const auto& report) {
    return report.first != slot && blames(report.second, slot);
  }));
}

/// Whether a report blames a slot that `of` is true for.
template <typename Of>
bool names_any(const std::map<int, std::vector<int>>& blamed, const Of& of) {
  return std::ranges::any_of(
      blamed, [&](const auto& report) { return std::ranges::any_of(report.second, of); });
}

bool covers(const std::vector<SlotPair>& pairs, const std::vector<int>& slots, std::uint32_t set) {
  const auto has = [&](int slot) {
    const auto at = std::ranges::lower_bound(slots, slot) - slots.begin();
    return (set >> at & 1U) != 0;
  };
  return std::ranges::all_of(
      pairs, [&](const SlotPair& pair) { return has(pair.first) || has(pair.second); });
}

/// `slots`: of the pairs, ascending.
std::vector<int> exact_cover(const std::vector<SlotPair>& pairs, const std::vector<int>& slots,
                             const std::map<int, std::vector<int>>& blamed) {
  std::vector<int> weights;
  for (const int slot : slots) weights.push_back(weight_of(slot, blamed));
  const auto weight = [&](std::uint32_t set) {
    int sum = 0;
    for (std::size_t i = 0; i < slots.size(); ++i)
      if ((set >> i & 1U) != 0) sum += weights[i];
    return sum;
  };
  const std::uint32_t all = (1U << slots.size()) - 1;
  std::uint32_t best = all;
  for (std::uint32_t set = 0; set < all; ++set) {
    const int size = std::popcount(set), best_size = std::popcount(best);
    if (size > best_size || !covers(pairs, slots, set)) continue;
    // The greater of two numbers has the higher slot where they first differ.
    if (size < best_size || std::pair(weight(set), set) > std::pair(weight(best), best)) best = set;
  }
  std::vector<int> cover;
  for (std::size_t i = 0; i < slots.size(); ++i)
    if ((best >> i & 1U) != 0) cover.push_back(slots[i]);
  return cover;
}

std::vector<int> greedy_cover(std::vector<SlotPair> pairs) {
  std::vector<int> cover;
  while (!pairs.empty()) {
    std::map<int, int> degree;
    for (const SlotPair& pair : pairs) ++degree[pair.first], ++degree[pair.second];
    const auto most = std::ranges::max_element(
        degree, {}, [](const auto& each) { return std::pair(each.second, each.first); });
    const int slot = most->first;
    std::erase_if(pairs, [&](const SlotPair& p) { return p.first == slot || p.second == slot; });
    cover.push_back(slot);
  }
  std::ranges::sort(cover);
  return cover;
}

/// Rule 2, for these pairs: fills `bad` and `counts_as_restart`.
void judge_pairs(TimePoint now, const std::vector<SlotPair>& pairs, const BlamedGroup& failure,
                 const FailureOptions& options, FailureVerdict& verdict) {
  for (const SlotPair& pair : pairs)
    for (const EarlierBlame& earlier : failure.before) {
      if (earlier.pair != pair) continue;
      const bool stalled = failure.committed <= earlier.committed;
      if (earlier.at + options.window > now || (stalled && earlier.committed > 0))
        verdict.bad.push_back(pair);
      else if (stalled)
        verdict.counts_as_restart = true;
    }
}

/// As `smallest_cover`, of the sets without those that are `needed`: the others of their pairs are
/// in each. Empty: there is no such set.
std::vector<int> cover_without(const std::vector<int>& needed, std::vector<SlotPair> pairs,
                               const std::map<int, std::vector<int>>& blamed) {
  std::erase_if(pairs, [](const SlotPair& pair) { return pair.first == pair.second; });
  const auto is_needed = [&](int slot) { return std::ranges::count(needed, slot) > 0; };
  std::set<int> cover;
  for (const auto& [one, other] : pairs) {
    if (is_needed(one) && is_needed(other)) return {};
    if (is_needed(one)) cover.insert(other);
    if (is_needed(other)) cover.insert(one);
  }
  std::erase_if(pairs, [&](const SlotPair& pair) {
    return cover.contains(pair.first) || cover.contains(pair.second);
  });
  for (const int slot : smallest_cover(pairs, blamed)) cover.insert(slot);
  return {cover.begin(), cover.end()};
}

}  // namespace

std::vector<SlotPair> blamed_pairs(const std::map<int, std::vector<int>>& blamed) {
  std::set<SlotPair> pairs;
  for (const auto& [slot, others] : blamed) {
    for (const int other : others) {
      const auto word = blamed.find(other);
      const bool denied =
          word != blamed.end() && !word->second.empty() && !blames(word->second, slot);
      if (!denied) pairs.insert(pair_of(slot, other));
    }
  }
  return pairs.empty() ? all_blamed_pairs(blamed) : std::vector(pairs.begin(), pairs.end());
}

std::vector<SlotPair> all_blamed_pairs(const std::map<int, std::vector<int>>& blamed) {
  std::set<SlotPair> pairs;
  for (const auto& [slot, others] : blamed)
    for (const int other : others) pairs.insert(pair_of(slot, other));
  if (pairs.empty()) pairs.insert(kNobody);
  return {pairs.begin(), pairs.end()};
}

std::vector<int> smallest_cover(const std::vector<SlotPair>& pairs,
                                const std::map<int, std::vector<int>>& blamed) {
  std::vector<SlotPair> between;
  std::set<int> slots;
  for (const SlotPair& pair : pairs) {
    if (pair.first == pair.second) continue;
    between.push_back(pair);
    slots.insert({pair.first, pair.second});
  }
  if (slots.size() > kMostExact) return greedy_cover(std::move(between));
  return exact_cover(between, {slots.begin(), slots.end()}, blamed);
}

FailureVerdict judge_failure(TimePoint now, const BlamedGroup& failure,
                             const FailureOptions& options) {
  FailureVerdict verdict;
  if (failure.blamed.empty()) return verdict;
  const auto silent = [&](int slot) { return !failure.blamed.contains(slot); };
  const bool all = std::ranges::none_of(failure.members, silent);
  TimePoint due = failure.since + (all ? options.settle : options.patience);
  if (names_any(failure.blamed, silent))
    due = std::max(due, failure.since + options.death_patience);
  if (failure.ending) due = std::max(due, failure.since + options.exit_patience);
  if (now < due) {
    verdict.again = due;
    return verdict;
  }
  verdict.decided = true;
  judge_pairs(now, blamed_pairs(failure.blamed), failure, options, verdict);
  if (verdict.bad.empty())
    judge_pairs(now, all_blamed_pairs(failure.blamed), failure, options, verdict);
  if (verdict.bad.empty()) return verdict;
  verdict.counts_as_restart = false;
  const std::vector<int> cover = cover_without(failure.needed, verdict.bad, failure.blamed);
  const std::size_t members = failure.members.size();
  const std::size_t twice = 2 * cover.size();
  const bool enough = options.majority ? twice < members : twice <= members;
  const bool may =
      !cover.empty() && enough && members - cover.size() >= std::max<std::size_t>(options.least, 1);
  if (may)
    verdict.left_out = {std::ranges::max(
        cover, {}, [&](int slot) { return std::pair(weight_of(slot, failure.blamed), slot); })};
  else
    verdict.counts_as_restart = true;
  return verdict;
}

}  // namespace muster::membership
