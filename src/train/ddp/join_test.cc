// SPDX-License-Identifier: BSD-3-Clause
#include "muster/join.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <any>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing {
namespace {

/// Counts the inputs of all ranks and records the hooks' calls.
class Counter : public Joinable {
 public:
  explicit Counter(Group group = nullptr) : group_(group ? std::move(group) : default_group()) {}

  void count_one() {
    notice = Join::notify_join_context(*this);
    add(1);
  }
  void add(int inputs) {
    auto sum = torch::tensor({inputs}, at::kLong);
    all_reduce(sum, {.group = group_});
    count += sum.item<std::int64_t>();
  }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    if (const auto found = options.kwargs.find("share_count"); found != options.kwargs.end())
      shares = std::any_cast<bool>(found->second);
    return std::make_unique<Hook>(*this);
  }
  c10::Device join_device() const override { return at::kCPU; }
  Group join_process_group() const override { return group_; }

  std::int64_t count = 0;
  int shadowed = 0;
  std::vector<bool> post_hooks;
  bool shares = false;
  JoinNotice notice;

 private:
  struct Hook : JoinHook {
    explicit Hook(Counter& counter) : counter(counter) {}
    void main_hook() override {
      ++counter.shadowed;
      counter.add(0);
    }
    void post_hook(bool is_last_joiner) override {
      counter.post_hooks.push_back(is_last_joiner);
      if (!counter.shares) return;
      auto most = torch::tensor({counter.count}, at::kLong);
      all_reduce(most, {.op = ReduceOp::MAX, .group = counter.group_});
      counter.count = most.item<std::int64_t>();
    }
    Counter& counter;
  };
  Group group_;
};

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Joining, Ranks, ::testing::Values(1, 2, 3, 4));

/// Rank 0 has the most inputs if `first_has_most`, otherwise the last rank.
int inputs_of(int rank, int ranks, bool first_has_most) {
  return 2 + 3 * (first_has_most ? ranks - 1 - rank : rank);
}

// spec: K7 a rank that is done shadows the others' collectives
TEST_P(Ranks, ThatHaveRunOutShadowTheOthers) {
  const int ranks = GetParam();
  for (const bool first_has_most : {true, false}) {
    on_ranks(ranks, [&](int rank) {
      const int mine = inputs_of(rank, ranks, first_has_most);
      const int most = inputs_of(first_has_most ? 0 : ranks - 1, ranks, first_has_most);
      Counter counter;
      Join join({&counter});
      int seen = 0;
      join.run([&] {
        for (; seen < mine; ++seen) {
          counter.count_one();
          int active = 0;
          for (int other = 0; other < ranks; ++other)
            active += inputs_of(other, ranks, first_has_most) > seen ? 1 : 0;
          EXPECT_EQ(counter.notice.active_ranks(), active);
        }
      });
      int all = 0;
      for (int other = 0; other < ranks; ++other) all += inputs_of(other, ranks, first_has_most);
      EXPECT_EQ(counter.count, all);
      EXPECT_EQ(seen, mine);
      EXPECT_EQ(counter.shadowed, most - mine);
      EXPECT_EQ(counter.post_hooks, std::vector<bool>{mine == most});
    });
  }
}

// spec: K7 several joinables, hooks in their order, options for them
TEST_P(Ranks, ShadowEveryJoinable) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    Counter first, second;
    Join join({&first, &second}, {.kwargs = {{"share_count", true}}});
    join.run([&] {
      for (int i = 0; i < 1 + 2 * rank; ++i) {
        first.count_one();
        EXPECT_TRUE(static_cast<bool>(first.notice));
        second.count_one();
        EXPECT_FALSE(static_cast<bool>(second.notice));
        EXPECT_EQ(second.notice.active_ranks(), 0);
      }
    });
    EXPECT_EQ(first.count, ranks * ranks);
    EXPECT_EQ(second.count, ranks * ranks);
    EXPECT_TRUE(first.shares && second.shares);
    EXPECT_EQ(first.shadowed, second.shadowed);
  });
}

// One Join per epoch, with the same joinables.
TEST_P(Ranks, JoinAgain) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    Counter counter;
    for (int epoch = 0; epoch < 3; ++epoch) {
      Join join({&counter});
      join.run([&] {
        for (int i = 0; i < 1 + (rank + epoch) % ranks; ++i) counter.count_one();
      });
      EXPECT_FALSE(static_cast<bool>(Join::notify_join_context(counter)))
          << "a finished Join sends nothing";
    }
    EXPECT_EQ(counter.count, 3 * ranks * (ranks + 1) / 2);
  });
}

// spec: K7.throw throw_on_early_termination
TEST_P(Ranks, AllStopWhereOneHasRunOut) {
  const int ranks = GetParam() + 1;
  on_ranks(ranks, [&](int rank) {
    Counter counter;
    Join join({&counter}, {.throw_on_early_termination = true});
    int seen = 0;
    try {
      join.run([&] {
        for (; seen < (rank == 1 ? 2 : 5); ++seen) counter.count_one();
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DistError& error) {
      EXPECT_HAS(error.what(), "rank 1 has run out of inputs while " + std::to_string(ranks - 1) +
                                   " of " + std::to_string(ranks));
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_EQ(error.ranks(), std::vector<int>{1});
    }
    EXPECT_EQ(seen, 2);
    EXPECT_EQ(counter.count, 2 * ranks);
    EXPECT_TRUE(counter.post_hooks.empty());
    counter.add(1);  // the group is usable
  });
}

// spec: K7 throw_on_early_termination with even inputs
TEST_P(Ranks, GoOnWhereAllHaveAsManyInputs) {
  on_ranks(GetParam(), [&](int) {
    Counter counter;
    Join join({&counter}, {.throw_on_early_termination = true});
    join.run([&] {
      for (int i = 0; i < 4; ++i) {
        counter.count_one();
        EXPECT_EQ(counter.notice.active_ranks(), get_world_size());
      }
    });
    EXPECT_EQ(counter.count, 4 * get_world_size());
    EXPECT_EQ(counter.post_hooks, std::vector<bool>{true});
  });
}

// spec: K10 enable
// spec: K7.enable enable
TEST_P(Ranks, SendNothingWhereItIsNotEnabled) {
  on_ranks(GetParam(), [&](int) {
    Counter counter;
    Join join({&counter}, {.enable = false});
    join.run([&] {
      for (int i = 0; i < 3; ++i) {
        counter.count_one();
        EXPECT_FALSE(static_cast<bool>(counter.notice));
      }
    });
    EXPECT_EQ(counter.count, 3 * get_world_size());
    EXPECT_TRUE(counter.post_hooks.empty());
  });
}

// spec: K10 the defaults
TEST(JoinOptions, HaveTorchsDefaults) {
  EXPECT_TRUE(JoinOptions().enable);
  EXPECT_FALSE(JoinOptions().throw_on_early_termination);
  EXPECT_TRUE(JoinOptions().divide_by_initial_world_size);
}

TEST(Joining, OnASubgroupLeavesTheOthersAlone) {
  on_ranks(3, [](int rank) {
    const auto pair = new_group({.ranks = {0, 2}});
    if (rank == 1) return;
    Counter counter(pair);
    Join join({&counter}, {.throw_on_early_termination = true});
    try {
      join.run([&] {
        for (int i = 0; i < 3 - rank; ++i) counter.count_one();
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DistError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{2}) << "ranks are the job's: " << error.what();
    }
  });
}

TEST(Joining, PassesOnWhatTheBodyThrows) {
  on_ranks(2, [](int) {
    Counter counter;
    {
      Join join({&counter});
      EXPECT_THROW(join.run([&] {
        counter.count_one();
        throw std::domain_error("a bad sample");
      }),
                   std::domain_error);
      EXPECT_TRUE(counter.post_hooks.empty());
    }
    Join again({&counter});
    again.run([&] { counter.count_one(); });
    EXPECT_EQ(counter.count, 4);
  });
}

TEST(Joining, RefusesWhatItCannotJoin) {
  on_ranks(2, [](int) {
    const auto other = new_group({.ranks = {0}});
    Counter a, b;
    EXPECT_HAS(message_of<DistError>([] { Join({}); }), "at least one joinable");
    EXPECT_HAS(message_of<DistError>([] { Join({nullptr}); }), "is null");
    EXPECT_HAS(message_of<DistError>([&] { Join({&a, &a}); }), "given twice");
    Counter elsewhere(other);
    const auto text = message_of<DistError>([&] { Join({&a, &elsewhere}); });
    EXPECT_HAS(text, get_rank() == 0 ? "have different ranks" : "not a member");
    Join join({&a});
    EXPECT_HAS(message_of<DistError>([&] { Join({&b, &a}); }), "another Join that is not over");
    join.finish();
    EXPECT_HAS(message_of<DistError>([&] { join.finish(); }), "finish() was called before");
    EXPECT_FALSE(static_cast<bool>(Join::notify_join_context(b)));
  });
}

}  // namespace
}  // namespace muster::testing
