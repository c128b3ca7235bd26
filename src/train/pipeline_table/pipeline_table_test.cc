// SPDX-License-Identifier: BSD-3-Clause
#include "muster/pipeline_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <tuple>

#include "testing/budget.h"
#include "testing/seed.h"
#include "testing/thrown.h"

namespace muster {
namespace {

using Pass = PipelinePass;

constexpr int kRanks = 16, kMicroBatches = 64;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

struct Cell {
  int ranks, micro_batches;
};

/// Every number of ranks and micro-batches; in the sanitized builds without MUSTER_TEST_LONG=1, the
/// small ones and an eighth of the others, drawn by the run's seed.
void for_cells(const std::function<void(Cell)>& body) {
  std::mt19937_64 random(testing::test_seed());
  for (int ranks = 1; ranks <= kRanks; ++ranks) {
    for (int micro_batches = 1; micro_batches <= kMicroBatches; ++micro_batches) {
      if (testing::kSanitized && !testing::long_tests() && (ranks > 4 || micro_batches > 8) &&
          random() % 8 != 0)
        continue;
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(micro_batches) +
                   " micro-batches, MUSTER_TEST_SEED=" + std::to_string(testing::test_seed()));
      body({ranks, micro_batches});
      if (::testing::Test::HasFailure()) return;
    }
  }
}

PipelineReport proven(const Result<PipelineTable>& table,
                      const PipelineCheckOptions& options = {}) {
  if (!table.ok()) {
    ADD_FAILURE() << table.status().message();
    return {};
  }
  const auto report = check_pipeline(*table, options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? *report : PipelineReport{};
}

// spec: T2.gpipe GPipe: every table is right with one message in flight, holds M activations, and
// is idle for (P - 1) / (M + P - 1)
TEST(PipelineTable, GPipeIsRight) {
  for_cells([](Cell cell) {
    const auto [ranks, count] = cell;
    const auto report = proven(gpipe_table(ranks, count), {.messages_in_flight = 1});
    EXPECT_EQ(report.peak_activations, std::vector<int>(at(ranks), count));
    EXPECT_NEAR(report.bubble_fraction(), (ranks - 1.0) / (count + ranks - 1.0), 1e-9);
  });
}

// spec: T2.one_f_one_b 1F1B: right with one message in flight, holds min(M, P - rank), GPipe's
// bubbles
TEST(PipelineTable, OneForwardOneBackwardIsRight) {
  for_cells([](Cell cell) {
    const auto [ranks, count] = cell;
    const auto table = one_f_one_b_table(ranks, count);
    const auto report = proven(table);
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(report.peak_activations[at(rank)], std::min(count, ranks - rank));
    EXPECT_NEAR(report.bubble_fraction(), (ranks - 1.0) / (count + ranks - 1.0), 1e-9);
    proven(table, {.messages_in_flight = 1});
  });
}

// spec: T2.interleaved interleaved 1F1B: right for every number of rounds, warm-up and one more in
// memory, bubbles (P - 1) / (V M + P - 1); more than one message in flight only for longer rounds
// than P
TEST(PipelineTable, InterleavedIsRight) {
  for_cells([](Cell cell) {
    const auto [ranks, count] = cell;
    for (const int stages : {1, 2, 3, 5}) {
      const int rounds = std::max(1, count / ranks);
      const auto table = interleaved_1f1b_table(ranks, stages, count);
      ASSERT_EQ(table.ok(), count % rounds == 0);
      if (!table.ok()) {
        EXPECT_HAS(table.status().message(), std::to_string(rounds) + " rounds");
        continue;
      }
      const int per_round = count / rounds;
      proven(table, {.messages_in_flight = std::max(1, per_round - ranks + 1)});
      const auto report = proven(table);
      for (int rank = 0; rank < ranks; ++rank)
        EXPECT_EQ(report.peak_activations[at(rank)],
                  std::min(stages * count, (stages - 1) * per_round + 2 * (ranks - 1 - rank) + 1));
      if (count % ranks == 0) {
        EXPECT_NEAR(report.bubble_fraction(), (ranks - 1.0) / (stages * count + ranks - 1.0), 1e-9);
      }
    }
  });
}

// spec: T2.zbv ZBV: no rank is idle between its first and its last action, and holds at most 2 P
TEST(PipelineTable, ZbvIsRight) {
  for_cells([](Cell cell) {
    const auto [ranks, count] = cell;
    proven(zbv_table(ranks, count), {.messages_in_flight = 1});
    const auto report = proven(zbv_table(ranks, count));
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(report.peak_activations[at(rank)], std::min(2 * ranks, 2 * count));
      if (count >= 2 * ranks - 1) {
        EXPECT_EQ(report.peak_activations[at(rank)], 2 * ranks);
        EXPECT_EQ(report.span[at(rank)], report.busy[at(rank)]);
      }
    }
    if (count >= 2 * ranks - 1) {
      EXPECT_NEAR(report.bubble_fraction(), (ranks - 1.0) / (6 * count + ranks - 1.0), 1e-9);
    }
  });
}

TEST(PipelineTable, ArgumentsBelowOneAreRefused) {
  EXPECT_HAS(gpipe_table(0, 1).status().message(), "GPipe: ranks, stages per rank");
  EXPECT_HAS(one_f_one_b_table(2, 0).status().message(), "are 2, 1 and 0");
  EXPECT_HAS(interleaved_1f1b_table(2, 0, 4).status().message(), "are 2, 0 and 4");
  EXPECT_HAS(zbv_table(-1, 4).status().message(), "are -1, 2 and 4");
  EXPECT_HAS(check_pipeline(*gpipe_table(2, 2), {.messages_in_flight = 0}).status().message(),
             "messages_in_flight must be at least 1");
}

// spec: T2.checker the checker names rank and action
TEST(PipelineTable, TheCheckNamesRankAndAction) {
  const auto said = [](const std::function<void(PipelineTable&)>& damage) {
    PipelineTable table = *one_f_one_b_table(2, 2);  // 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1
    damage(table);
    return check_pipeline(table).status().message();
  };
  EXPECT_HAS(said([](auto& table) { table.actions[1].pop_back(); }),
             "rank 1: stage 1 does micro-batch 1 1 times forward and 0 times backward");
  EXPECT_HAS(said([](auto& table) { table.actions[0][0].stage = 1; }),
             "rank 0: 1F0: this rank has no such stage");
  EXPECT_HAS(said([](auto& table) { table.actions[0][0].micro_batch = 2; }),
             "rank 0: 0F2: there is no such micro-batch");
  EXPECT_HAS(said([](auto& table) { std::swap(table.actions[0][0], table.actions[0][1]); }),
             "rank 1: 1F0 receives micro-batch 1, which stage 0 sent first");
  EXPECT_HAS(said([](auto& table) { std::swap(table.actions[1][0], table.actions[1][1]); }),
             "rank 1: 1B0 needs 1F0 first");
  PipelineTable halves = *zbv_table(1, 1);  // 0F0 1F0 1I0 1W0 0I0 0W0
  std::swap(halves.actions[0][2], halves.actions[0][3]);
  EXPECT_HAS(check_pipeline(halves).status().message(), "rank 0: 1W0 needs 1I0 first");
  halves = *zbv_table(1, 1);
  std::swap(halves.actions[0][0], halves.actions[0][1]);
  EXPECT_HAS(check_pipeline(halves).status().message(), "1F0 needs stage 0 of this rank first");
  PipelineTable late = *gpipe_table(2, 2);
  late.actions[0] = {
      {0, Pass::forward, 0}, {0, Pass::backward, 0}, {0, Pass::forward, 1}, {0, Pass::backward, 1}};
  EXPECT_HAS(check_pipeline(late).status().message(),
             "never ends: rank 0 waits to receive for 0B0; rank 1 waits to receive for 1F1");
}

// spec: T2 limited buffers: sends that block on both sides are a deadlock, one more message is none
TEST(PipelineTable, BlockedSendsAreADeadlock) {
  PipelineTable table = *gpipe_table(2, 4);
  table.actions[1] = {{1, Pass::forward, 0},  {1, Pass::backward, 0}, {1, Pass::forward, 1},
                      {1, Pass::backward, 1}, {1, Pass::forward, 2},  {1, Pass::backward, 2},
                      {1, Pass::forward, 3},  {1, Pass::backward, 3}};
  EXPECT_HAS(check_pipeline(table, {.messages_in_flight = 1}).status().message(),
             "never ends: rank 0 cannot send what it computed in 0F3; rank 1 cannot send what it "
             "computed in 1B1");
  EXPECT_TRUE(check_pipeline(table, {.messages_in_flight = 2}).ok());
}

/// Whether the table is right, by another way than the check's: all actions and all that they wait
/// for are a graph, and it has no cycle.
class Graph {
 public:
  explicit Graph(const PipelineTable& table) {
    for (int rank = 0; rank < table.ranks(); ++rank)
      for (const auto& action : table.actions[at(rank)]) ++count_[key(action)];
    add_edges(table);
  }
  bool is_right(const PipelineTable& table) {
    for (int stage = 0; stage < table.stages(); ++stage) {
      for (int i = 0; i < table.micro_batches; ++i) {
        const auto times = [&](Pass pass) { return count_[{stage, pass, i}]; };
        if (times(Pass::forward) != 1 || times(Pass::backward) + times(Pass::backward_input) != 1 ||
            times(Pass::backward_weight) != times(Pass::backward_input))
          return false;
      }
    }
    if (!same_orders(table)) return false;
    for (const auto& [node, times] : count_)
      if (times > 0 && !ends(node)) return false;
    return true;
  }

 private:
  using Key = std::tuple<int, Pass, int>;
  static Key key(const PipelineAction& action) {
    return {action.stage, action.pass, action.micro_batch};
  }
  void need(const Key& later, const Key& earlier) {
    const auto found = count_.find(earlier);
    if (found != count_.end() && found->second > 0) needs_[later].push_back(earlier);
  }
  void add_edges(const PipelineTable& table) {
    for (int rank = 0; rank < table.ranks(); ++rank) {
      const auto& list = table.actions[at(rank)];
      for (std::size_t i = 0; i < list.size(); ++i) {
        const auto [stage, pass, micro_batch] = list[i];
        const Key self = key(list[i]);
        if (i > 0) need(self, key(list[i - 1]));
        if (pass == Pass::forward) need(self, {stage - 1, Pass::forward, micro_batch});
        if (pass == Pass::backward_weight) need(self, {stage, Pass::backward_input, micro_batch});
        if (pass == Pass::forward || pass == Pass::backward_weight) continue;
        need(self, {stage, Pass::forward, micro_batch});
        need(self, {stage + 1, Pass::backward, micro_batch});
        need(self, {stage + 1, Pass::backward_input, micro_batch});
      }
    }
  }
  /// Neighbours on different ranks handle the micro-batches in the same order.
  static bool same_orders(const PipelineTable& table) {
    const auto order = [&](int stage, bool forward) {
      std::vector<int> micro_batches;
      for (const auto& action : table.actions[at(table.rank_of_stage[at(stage)])])
        if (action.stage == stage && action.pass != Pass::backward_weight &&
            (action.pass == Pass::forward) == forward)
          micro_batches.push_back(action.micro_batch);
      return micro_batches;
    };
    for (int stage = 0; stage + 1 < table.stages(); ++stage) {
      if (table.rank_of_stage[at(stage)] == table.rank_of_stage[at(stage + 1)]) continue;
      for (const bool forward : {true, false})
        if (order(stage, forward) != order(stage + 1, forward)) return false;
    }
    return true;
  }
  bool ends(const Key& node) {
    const auto [state, is_new] = state_.try_emplace(node, 1);
    if (!is_new) return state->second == 2;
    for (const auto& earlier : needs_[node])
      if (!ends(earlier)) return false;
    state_[node] = 2;
    return true;
  }

  std::map<Key, int> count_, state_;  // state: 1 under way, 2 ends
  std::map<Key, std::vector<Key>> needs_;
};

PipelineTable drawn_table(std::mt19937_64& random) {
  const int ranks = 1 + static_cast<int>(random() % 5);
  const int count = ranks * (1 + static_cast<int>(random() % 3));
  switch (random() % 4) {
    case 0: return *gpipe_table(ranks, count);
    case 1: return *one_f_one_b_table(ranks, count);
    case 2: return *interleaved_1f1b_table(ranks, 2, count);
    default: return *zbv_table(ranks, count);
  }
}

// spec: T2 a dropped or doubled action is refused; exchanged ones are refused, or the table is
// right all the same
TEST(PipelineTable, DamagedTablesAreRefused) {
  std::mt19937_64 random(testing::test_seed());
  int accepted = 0, refused = 0;
  for (int round = 0; round < (testing::long_tests() ? 20000 : 500); ++round) {
    SCOPED_TRACE("round " + std::to_string(round) +
                 ", MUSTER_TEST_SEED=" + std::to_string(testing::test_seed()));
    PipelineTable table = drawn_table(random);
    ASSERT_TRUE(Graph(table).is_right(table));
    auto& list = table.actions[random() % table.actions.size()];
    const auto drawn = [&] { return static_cast<std::ptrdiff_t>(random() % list.size()); };
    const auto kind = random() % 3;
    if (kind == 0) list.erase(list.begin() + drawn());
    if (kind == 1) {
      const auto doubled = list[static_cast<std::size_t>(drawn())];
      list.insert(list.begin() + drawn(), doubled);
    }
    if (kind == 2)
      std::swap(list[static_cast<std::size_t>(drawn())], list[static_cast<std::size_t>(drawn())]);
    const bool right = check_pipeline(table).ok();
    if (kind < 2) {
      ASSERT_FALSE(right);
    }
    ASSERT_EQ(right, Graph(table).is_right(table)) << check_pipeline(table).status().message();
    ++(right ? accepted : refused);
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, accepted);
}

}  // namespace
}  // namespace muster
