// SPDX-License-Identifier: BSD-3-Clause
/// Test support: what clients asked of one key and were told, and whether there is an order of
/// their calls that explains it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::store {

/// Values are positive numbers, in the store their decimal texts; 0 is "missing" or "empty".
enum class Act : std::uint8_t { set, get, add, compare_set, erase, check, push, pop, length };

enum class Ending : std::uint8_t {
  unknown = 0,  ///< never answered: it has taken effect once, some time after `begin`, or never
  answered = 1,
  without_effect = 2  ///< refused, or waited in vain: it changed nothing and says nothing
};

/// One call, from before it was made (`begin`) until after it returned (`end`), on one clock.
struct Call {
  Act act = Act::get;
  Ending ending = Ending::unknown;
  std::int16_t client = 0;
  std::int16_t key = 0;
  std::int64_t argument = 0;  ///< set, push: the value; add: the amount; compare_set: the new value
  std::int64_t expected = 0;  ///< compare_set
  std::int64_t result = 0;    ///< get, add, compare_set, pop: a value; erase, check: 0 or 1
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

namespace histories {

/// One key of a store with one client: a value (0: missing) or, where queue calls use it, a queue.
struct Key {
  std::int64_t value = 0;
  std::deque<std::int64_t> queue;
  friend auto operator<=>(const Key&, const Key&) = default;

  /// Carries `call` out. False where its answer is another than the one that was given.
  bool play(const Call& call) {
    const std::int64_t told = answer(call);
    return call.ending == Ending::unknown || told == call.result;
  }

 private:
  std::int64_t answer(const Call& call) {
    switch (call.act) {
      case Act::set: value = call.argument; return 0;
      case Act::get: return value;
      case Act::add: return value += call.argument;
      case Act::compare_set:
        if (value == call.expected) return value = call.argument;
        return value == 0 ? call.expected : value;
      case Act::erase: return std::exchange(value, 0) != 0 ? 1 : 0;
      case Act::check: return value != 0 ? 1 : 0;
      case Act::push: queue.push_back(call.argument); return 0;
      case Act::pop: {
        if (queue.empty()) return 0;
        const std::int64_t first = queue.front();
        queue.pop_front();
        return first;
      }
      case Act::length: return static_cast<std::int64_t>(queue.size());
    }
    return 0;
  }
};

inline constexpr const char* kNames[] = {"set",   "get",  "add", "compare_set", "erase",
                                         "check", "push", "pop", "length"};

inline std::string text(const Call& call) {
  std::string line = "client " + std::to_string(call.client) + " " +
                     kNames[static_cast<std::size_t>(call.act)] + "(";
  if (call.act == Act::compare_set) line += std::to_string(call.expected) + ", ";
  line += std::to_string(call.argument) + ") from " + std::to_string(call.begin);
  if (call.ending == Ending::unknown) return line + ", never answered";
  return line + " to " + std::to_string(call.end) + ": " + std::to_string(call.result);
}

/// Begins and ends of calls in the order of time, as a list from which calls are taken and into
/// which they are put back in reverse order.
class Search {
 public:
  explicit Search(std::span<const Call> calls) {
    for (const Call& call : calls)
      if (call.ending != Ending::without_effect) calls_.push_back(call);
    std::vector<Entry> entries;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      entries.push_back({i, false, calls_[i].begin});
      if (calls_[i].ending == Ending::answered) {
        entries.push_back({i, true, calls_[i].end});
        ++answers_left_;
      }
    }
    // At one moment begins come before ends: such calls overlap.
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.time, a.is_end) < std::pair(b.time, b.is_end);
    });
    nodes_.resize(entries.size() + 2);  // the first is the list's head, the last its tail
    places_.resize(calls_.size());
    for (std::size_t at = 0; at < nodes_.size(); ++at) {
      nodes_[at].before = at == 0 ? 0 : at - 1;
      nodes_[at].after = at + 1;
      if (at == 0 || at + 1 == nodes_.size()) continue;
      nodes_[at].entry = entries[at - 1];
      (nodes_[at].entry.is_end ? places_[nodes_[at].entry.call].second
                               : places_[nodes_[at].entry.call].first) = at;
    }
    played_.assign(calls_.size(), false);
  }

  bool succeeds() {
    const std::size_t tail = nodes_.size() - 1;
    std::size_t at = nodes_[0].after;
    while (answers_left_ > 0) {
      if (at != tail && !nodes_[at].entry.is_end) {
        at = try_to_play(nodes_[at].entry.call) ? nodes_[0].after : nodes_[at].after;
      } else {  // a call ends that no order so far has played: the last choice was wrong
        if (order_.empty()) return false;
        at = nodes_[take_back()].after;
      }
    }
    return true;
  }

  std::string report() const {
    std::string all = "no order of these calls explains their answers:\n";
    for (const Call& call : calls_) all += "  " + text(call) + "\n";
    all += "the longest explanation:\n";
    for (const std::size_t call : longest_) all += "  " + text(calls_[call]) + "\n";
    return all;
  }

 private:
  struct Entry {
    std::size_t call = 0;
    bool is_end = false;
    std::int64_t time = 0;
  };
  struct Node {
    Entry entry;
    std::size_t before = 0, after = 0;
  };

  bool try_to_play(std::size_t call) {
    Key next = key_;
    if (!next.play(calls_[call])) return false;
    played_[call] = true;
    if (!seen_.emplace(played_, next).second) {
      played_[call] = false;
      return false;
    }
    order_.push_back(call);
    states_.push_back(std::exchange(key_, std::move(next)));
    if (order_.size() > longest_.size()) longest_ = order_;
    lift(places_[call].first);
    if (calls_[call].ending == Ending::answered) {
      lift(places_[call].second);
      --answers_left_;
    }
    return true;
  }

  /// Returns where the call that was taken back stands in the list.
  std::size_t take_back() {
    const std::size_t call = order_.back();
    order_.pop_back();
    key_ = std::move(states_.back());
    states_.pop_back();
    played_[call] = false;
    if (calls_[call].ending == Ending::answered) {
      put_back(places_[call].second);
      ++answers_left_;
    }
    put_back(places_[call].first);
    return places_[call].first;
  }

  void lift(std::size_t node) {
    nodes_[nodes_[node].before].after = nodes_[node].after;
    nodes_[nodes_[node].after].before = nodes_[node].before;
  }
  void put_back(std::size_t node) {
    nodes_[nodes_[node].before].after = node;
    nodes_[nodes_[node].after].before = node;
  }

  std::vector<Call> calls_;
  std::vector<Node> nodes_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;  // of each call: its begin and its end
  std::size_t answers_left_ = 0;
  Key key_;
  std::vector<bool> played_;
  std::vector<std::size_t> order_, longest_;
  std::vector<Key> states_;  // before each call of `order_`
  std::set<std::pair<std::vector<bool>, Key>> seen_;
};

}  // namespace histories

/// Whether the calls on one key are linearizable: whether each answered call can be given a moment
/// between its begin and its end, and each unanswered one a moment after its begin or none, so that
/// the calls in the order of their moments are told what a store of one client would have told.
/// Empty: they are. Otherwise the calls, with the longest explanation that was found.
///
/// The search is Wing and Gong's with Lowe's memory of states that were seen; its time grows
/// exponentially with the number of calls under way at once, so keep that below about a dozen.
inline std::optional<std::string> why_not_linearizable(std::span<const Call> calls) {
  histories::Search search(calls);
  if (search.succeeds()) return std::nullopt;
  return search.report();
}

}  // namespace muster::store
