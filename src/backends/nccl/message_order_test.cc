// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/message_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::nccl {
namespace {

using Steps = MessageOrder::MessageSteps;

/// Ranks whose notes travel through queues, in any order but that of each pair.
class OrderedRanks {
 public:
  explicit OrderedRanks(int ranks)
      : orders_(static_cast<std::size_t>(ranks)), launched_(orders_.size()) {}

  static MessagePair pair_of(int a, int b, std::uint32_t group = 1) {
    return {group, std::min(a, b), std::max(a, b)};
  }
  void post(int rank, int peer, std::uint32_t sends, std::uint32_t receives,
            std::uint32_t group = 1) {
    posted_ += sends + receives;
    take(rank, at(rank).post(pair_of(rank, peer, group), rank < peer, sends, receives));
  }
  bool has_notes() const {
    return std::ranges::any_of(notes_, [](const auto& queue) { return !queue.second.empty(); });
  }
  /// Delivers the first note of one of the queues.
  void deliver(std::mt19937_64& random) {
    std::vector<Route> routes;
    for (const auto& [route, queue] : notes_)
      if (!queue.empty()) routes.push_back(route);
    deliver(routes[random() % routes.size()]);
  }
  void deliver_from(int rank, int peer) { deliver({pair_of(rank, peer), peer}); }
  void drop(int rank, std::uint32_t group) { take(rank, at(rank).drop(group)); }
  const std::vector<MessageRound>& launched(int rank) const {
    return launched_[static_cast<std::size_t>(rank)];
  }
  std::uint32_t posted() const { return posted_; }

  /// Delivers all notes, those that are under way at the same time together.
  void deliver_all() {
    while (has_notes()) {
      std::vector<Route> routes;
      for (const auto& [route, queue] : notes_)
        for (std::size_t i = 0; i < queue.size(); ++i) routes.push_back(route);
      for (const auto& route : routes) deliver(route);
    }
  }
  /// Carries out the launched rounds on devices with room for one kernel. Returns how many messages
  /// were left over. `steps`: is set to how often kernels begin, if all take the same time.
  std::uint32_t run(int* steps = nullptr) const {
    std::vector<std::size_t> next(orders_.size());
    std::uint32_t left = posted_;
    const auto head = [&](int rank) -> const MessageRound* {
      const auto& mine = launched(rank);
      const auto at = next[static_cast<std::size_t>(rank)];
      return at < mine.size() ? &mine[at] : nullptr;
    };
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<bool> busy(orders_.size());
      for (int rank = 0; rank < static_cast<int>(orders_.size()); ++rank) {
        const auto* const mine = head(rank);
        if (mine == nullptr || mine->pair.low != rank) continue;
        const auto high = static_cast<std::size_t>(mine->pair.high);
        if (busy[static_cast<std::size_t>(rank)] || busy[high]) continue;
        const auto* const theirs = head(mine->pair.high);
        if (theirs == nullptr || theirs->pair != mine->pair) continue;
        busy[static_cast<std::size_t>(rank)] = busy[high] = true;
        EXPECT_EQ(mine->sends, theirs->receives);
        EXPECT_EQ(mine->receives, theirs->sends);
        left -= 2 * (mine->sends + mine->receives);
        ++next[static_cast<std::size_t>(rank)];
        ++next[static_cast<std::size_t>(mine->pair.high)];
        moved = true;
      }
      if (moved && steps != nullptr) ++*steps;
    }
    return left;
  }

 private:
  using Route = std::pair<MessagePair, int>;  // and the receiver
  MessageOrder& at(int rank) { return orders_[static_cast<std::size_t>(rank)]; }
  void deliver(const Route& route) {
    auto& queue = notes_[route];
    const auto note = queue.front();
    queue.pop_front();
    EXPECT_EQ(at(route.second).why_refused(route.first, route.second == route.first.low, note), "");
    take(route.second, at(route.second).receive(route.first, note));
  }
  void take(int rank, const Steps& steps) {
    for (const auto& [pair, note] : steps.notes)
      notes_[{pair, rank == pair.low ? pair.high : pair.low}].push_back(note);
    auto& launched = launched_[static_cast<std::size_t>(rank)];
    launched.insert(launched.end(), steps.rounds.begin(), steps.rounds.end());
  }

  std::vector<MessageOrder> orders_;
  std::vector<std::vector<MessageRound>> launched_;
  std::map<Route, std::deque<MessageNote>> notes_;
  std::uint32_t posted_ = 0;
};

/// Random messages among random ranks, of one or two groups, posted and matched in random order.
void play(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&](int of) { return static_cast<int>(random() % static_cast<unsigned>(of)); };
  const int ranks = 2 + draw(4);
  OrderedRanks job(ranks);
  using Post = std::tuple<int, int, std::uint32_t>;  // peer, whether it sends, group
  std::vector<std::deque<Post>> programs(static_cast<std::size_t>(ranks));
  for (int message = draw(40); message > 0; --message) {
    const int from = draw(ranks), to = (from + 1 + draw(ranks - 1)) % ranks;
    const auto group = static_cast<std::uint32_t>(1 + draw(2));
    programs[static_cast<std::size_t>(from)].emplace_back(to, 1, group);
    programs[static_cast<std::size_t>(to)].emplace_back(from, 0, group);
  }
  for (auto& program : programs) std::ranges::shuffle(program, random);
  for (;;) {
    std::vector<int> busy;
    for (int rank = 0; rank < ranks; ++rank)
      if (!programs[static_cast<std::size_t>(rank)].empty()) busy.push_back(rank);
    const bool has_notes = job.has_notes();
    if (busy.empty() && !has_notes) break;
    if (has_notes && (busy.empty() || draw(2) == 0)) {
      job.deliver(random);
      continue;
    }
    const int rank = busy[static_cast<std::size_t>(draw(static_cast<int>(busy.size())))];
    auto& program = programs[static_cast<std::size_t>(rank)];
    const auto [peer, sends, group] = program.front();
    program.pop_front();
    job.post(rank, peer, sends ? 1 : 0, sends ? 0 : 1, group);
  }
  EXPECT_EQ(job.run(), 0U) << "of " << job.posted() << " messages on " << ranks << " ranks";
}

// spec: E1 messages of any ranks in any order do not wait for each other in a circle, on devices
// with room for one kernel
TEST(MessageOrder, RandomProgramsEnd) {
  const int seeds = testing::long_tests() ? 100'000 : 10'000;
  const auto first = testing::test_seed();
  for (int i = 0; i < seeds && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("seed " + std::to_string(first + static_cast<std::uint64_t>(i)));
    play(first + static_cast<std::uint64_t>(i));
  }
}

// spec: E5 a ring on 64 ranks, whose rounds begin at the same time, runs in a few steps: not one
// pair after another. docs/user/nccl.md has the numbers.
TEST(MessageOrder, ARingRunsInAFewSteps) {
  constexpr int kRanks = 64;
  OrderedRanks job(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    job.post(rank, (rank + 1) % kRanks, 1, 0);
    job.post(rank, (rank + kRanks - 1) % kRanks, 0, 1);
  }
  job.deliver_all();
  int steps = 0;
  EXPECT_EQ(job.run(&steps), 0U);
  EXPECT_LE(steps, 8) << "2 are the least";
}

TEST(MessageOrder, AnExchangeIsOneRound) {
  std::mt19937_64 random(1);
  OrderedRanks job(2);
  job.post(1, 0, 1, 1);
  while (job.has_notes()) job.deliver(random);
  EXPECT_TRUE(job.launched(1).empty()) << "rank 0 has posted nothing";
  job.post(0, 1, 1, 1);
  while (job.has_notes()) job.deliver(random);
  for (const int rank : {0, 1}) {
    ASSERT_EQ(job.launched(rank).size(), 1U);
    EXPECT_EQ(job.launched(rank)[0].sends, 1U);
    EXPECT_EQ(job.launched(rank)[0].receives, 1U);
  }
}

TEST(MessageOrder, AMessageThatItsPeerNeverPostsHoldsUpNoOther) {
  std::mt19937_64 random(1);
  OrderedRanks job(3);
  job.post(0, 1, 1, 0);
  job.post(0, 2, 1, 0);
  job.post(2, 0, 0, 1);
  while (job.has_notes()) job.deliver(random);
  EXPECT_EQ(job.launched(0).size(), 1U);
  EXPECT_EQ(job.launched(2).size(), 1U);
}

// spec: E1 what a peer says of its messages is refused if it cannot be true, and moves no clock
TEST(MessageOrder, NotesThatCannotBeTrueAreRefused) {
  using NoteStage = MessageNote::NoteStage;
  constexpr std::uint64_t kNever = ~std::uint64_t{0};
  const MessagePair pair{1, 0, 1};
  struct RefusedNote {
    MessageNote note;
    bool leads;
    const char* part;
  };
  const RefusedNote kCases[] = {
      {{.kind = static_cast<NoteStage>(7), .sends = 1}, true, "no kind"},
      {{.kind = NoteStage::posted, .sends = 1, .reserved = 1}, true, "no kind"},
      {{.kind = NoteStage::posted, .sends = 1}, false, "the other way"},
      {{.kind = NoteStage::proposed, .sends = 1, .time = 1}, true, "the other way"},
      {{.kind = NoteStage::posted}, true, "no messages"},
      {{.kind = NoteStage::posted, .sends = kMostPosted + 1}, true, "more messages"},
      {{.kind = NoteStage::posted, .receives = kMostPosted}, true, "more messages"},
      {{.kind = NoteStage::proposed, .sends = 1, .time = kNever}, false, "no clock"},
      {{.kind = NoteStage::proposed, .receives = 2, .time = 1}, false, "not posted"},
      {{.kind = NoteStage::settled, .time = 1}, true, "not proposed"},
  };
  for (const auto& one : kCases) {
    MessageOrder order;
    order.post(pair, one.leads, 1, 1);
    if (one.leads) order.receive(pair, {.kind = NoteStage::posted, .receives = 1});
    if (one.leads) order.receive(pair, {.kind = NoteStage::settled, .time = 1});
    if (one.leads) order.receive(pair, {.kind = NoteStage::posted, .receives = 1});
    EXPECT_NE(order.why_refused(pair, one.leads, one.note).find(one.part), std::string::npos)
        << order.why_refused(pair, one.leads, one.note) << ", not " << one.part;
  }
  MessageOrder order;
  order.post(pair, true, 1, 0);
  order.receive(pair, {.kind = NoteStage::posted, .receives = 1});
  EXPECT_NE(order.why_refused(pair, true, {.kind = NoteStage::settled}), "") << "no time";
  EXPECT_NE(order.why_refused(pair, true, {.kind = NoteStage::settled, .time = kNever}), "");
  EXPECT_EQ(order.why_refused(pair, true, {.kind = NoteStage::settled, .time = 1}), "");
}

// Rank 1 does not answer rank 0, whose later rounds wait for that until the group is dropped.
TEST(MessageOrder, AGroupThatHasFailedHoldsUpNoOther) {
  OrderedRanks job(3);
  job.post(1, 0, 0, 1, 7);
  std::mt19937_64 random(1);
  job.deliver(random);
  job.post(0, 1, 1, 0, 7);  // proposed, never settled
  job.post(2, 0, 0, 1);
  job.deliver_from(2, 0);
  job.post(0, 2, 1, 0);
  job.deliver_from(0, 2);
  job.deliver_from(2, 0);
  EXPECT_TRUE(job.launched(0).empty());
  job.drop(0, 7);
  ASSERT_EQ(job.launched(0).size(), 1U);
  EXPECT_EQ(job.launched(0)[0].pair.high, 2);
}

}  // namespace
}  // namespace muster::nccl
