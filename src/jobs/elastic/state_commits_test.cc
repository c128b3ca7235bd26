// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/state_commits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/errors.h"
#include "testing/thrown.h"

namespace muster::elastic {
namespace {

constexpr StateRefusals kTestRefusals{.no_commit = "no commit",
                                      .nothing_bound = "nothing bound",
                                      .not_restored = "not restored",
                                      .bound_already = "bound already"};

/// A tensor that all ranks have alike, a text with a zero in it, and a part of each rank's own.
struct TestObjects final : StateObjects {
  at::Tensor same = at::zeros({3}), part = at::zeros({2}, at::kLong);
  std::string text = std::string(1, '\0');
  std::int64_t seeded = -1;
  std::int64_t first = 0, all = 2;  // of `part`
  StateCommits commits{*this, kTestRefusals};

  TestObjects() = default;
  TestObjects(int rank, int size) : first(2 * rank), all(2 * size) {}

  void set(std::int64_t number) {
    same.fill_(number);
    part.copy_(at::arange(first, first + 2) + 100 * number);
    text = std::string(1, '\0') + std::to_string(number);
  }
  void expect(std::int64_t number) const {
    EXPECT_SAME(same, at::full({3}, static_cast<float>(number)));
    EXPECT_EQ(text, std::string(1, '\0') + std::to_string(number));
  }
  void expect_part(std::int64_t number) const {
    EXPECT_SAME(part, at::arange(first, first + 2) + 100 * number);
  }

  AlikeContents contents() override { return {text, {"same"}, {same}}; }
  void put_back(const AlikeContents& from) override {
    text = from.rest;
    same.copy_(from.tensors.at(0));
  }
  void reseed(std::int64_t commit, int) override { seeded = commit; }
  ShardedContents sharded_contents() override { return {items(), "values"}; }
  std::vector<checkpoint::CheckpointItem> wanted_shards(const shards::Index& index) override {
    EXPECT_EQ(index.values, "values");
    EXPECT_EQ(index.tensors.at("part").sizes, (shards::Extent{all}));
    return items();
  }
  void put_back_sharded() override {}

 private:
  std::vector<checkpoint::CheckpointItem> items() const {
    return {checkpoint::stretch_item("part", part, {all}, first)};
  }
};

// spec: L6 the first commit is rank 0's state; a rank without memory gets the newest commit of any
TEST(StateCommits, SurvivorsGiveTheirNewestCommit) {
  testing::on_ranks(3, [](int rank) {
    TestObjects objects;
    objects.set(10 + rank);
    objects.commits.from_survivors();
    objects.expect(10);
    EXPECT_EQ(objects.commits.number(), 1);
    for (std::int64_t number = 2; number <= 4; ++number) {
      objects.set(number);
      EXPECT_FALSE(objects.commits.commit());
      EXPECT_EQ(objects.seeded, number);
    }
    objects.set(9);
    TestObjects fresh;
    TestObjects& next = rank == 0 ? fresh : objects;
    next.commits.from_survivors();
    next.expect(4);
    EXPECT_EQ(next.commits.number(), 4);
    EXPECT_EQ(next.seeded, 4);
    next.set(5);
    next.commits.commit();
    next.set(9);
    next.commits.restore();
    next.expect(5);
    next.commits.agree_on_end();
  });
}

// spec: L7 with shards: all of it comes back, to the State before the function is called and to the
// shards when they are restored
TEST(StateCommits, ShardsComeBackWithTheRest) {
  testing::on_ranks(2, [](int rank) {
    TestObjects objects(rank, 2);
    StateCommits& commits = objects.commits;
    commits.from_survivors();
    objects.set(1);
    commits.bind();
    commits.restore_sharded();
    for (std::int64_t number = 2; number <= 4; ++number) {
      objects.set(number);
      commits.commit();
    }
    EXPECT_EQ(commits.number(), 4);
    objects.set(9);
    commits.restore();
    objects.expect(4);
    objects.expect_part(4);
    objects.set(9);
    commits.unbind();
    commits.from_survivors();
    objects.expect(4);
    objects.expect_part(9);
    commits.bind();
    commits.restore_sharded();
    objects.expect_part(4);
    EXPECT_EQ(commits.number(), 4);
    EXPECT_EQ(objects.seeded, 4);
    objects.set(5);
    commits.commit();
    objects.set(9);
    commits.before_leaving();
    objects.expect(5);
  });
}

// spec: L7 what a program does wrong is said to it
TEST(StateCommits, RefusesCommitsWithoutTheirShards) {
  testing::on_ranks(2, [](int rank) {
    TestObjects objects(rank, 2);
    StateCommits& commits = objects.commits;
    const auto refused = [](auto call) { return testing::message_of<DistError>(call); };
    EXPECT_EQ(refused([&] { commits.restore(); }), "no commit");
    commits.bind();
    EXPECT_EQ(refused([&] { commits.bind(); }), "bound already");
    EXPECT_EQ(refused([&] { commits.commit(); }), "not restored");
    commits.restore_sharded();
    commits.unbind();
    EXPECT_EQ(refused([&] { commits.commit(); }), "nothing bound");
    EXPECT_EQ(commits.number(), 1);
  });
}

// spec: L6 a step that is done again draws the same numbers, in a process without a group too
TEST(StateCommits, AStateAloneIsSeededAtEveryCommit) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
  State state;
  state.add_random(7, generator);
  state.commit();
  const at::Tensor drawn = at::randn({4}, generator);
  state.restore();
  EXPECT_SAME(at::randn({4}, generator), drawn);
}

}  // namespace
}  // namespace muster::elastic
