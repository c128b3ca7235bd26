// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/state_commits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
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

/// As a worker of an earlier launch on this node has left it, made in `epoch`.
std::vector<Descriptor> handed_over(const CommitMemory& copy, std::int64_t epoch) {
  CommitLabel label = *copy.label();
  label.id.epoch = epoch;
  auto memory = CommitMemory::make();
  EXPECT_TRUE(memory.ok() && memory->begin(label).ok());
  std::ranges::copy(copy.held_description(), memory->description().begin());
  std::ranges::copy(copy.held_data(), memory->data().begin());
  memory->finish();
  std::vector<Descriptor> files;
  files.emplace_back(::dup(memory->descriptor()));
  return files;
}

// spec: L14.node what a process that was left out has handed over is the job's last commit where no
// rank has another one, and goes to all ranks
TEST(StateCommits, ACommitThatWasHandedOverIsASource) {
  testing::on_ranks(2, [](int rank) {
    TestObjects before;
    before.commits.from_survivors();
    for (std::int64_t number = 2; number <= 4; ++number) {
      before.set(number);
      before.commits.commit();
    }
    const auto copy = before.commits.hand_over();
    ASSERT_TRUE(copy);
    const auto late = [&] { before.commits.commit(); };
    EXPECT_EQ(testing::message_of<DistError>(late),
              "the job goes on without this node, which makes no commit any more");
    EXPECT_EQ(before.commits.number(), 4);
    TestObjects next;
    next.set(99);
    if (rank == 1) next.commits.adopt(handed_over(*copy, 3));
    next.commits.from_survivors();
    next.expect(4);
    EXPECT_EQ(next.commits.number(), 4);
    next.set(5);
    next.commits.commit();
    next.set(9);
    next.commits.restore();
    next.expect(5);
    TestObjects without;
    without.commits.from_survivors();
    EXPECT_FALSE(without.commits.hand_over()) << "the program's own state";
  });
}

// spec: L14.node, L6 two commits of one number are told apart by their epochs: that of the later
// epoch is the newer one, also than one of a higher number
TEST(StateCommits, TheCommitOfTheLaterEpochIsTheNewerOne) {
  for (const std::int64_t others : {2, 3, 5}) {
    SCOPED_TRACE(others);
    testing::on_ranks(2, [&](int rank) {
      TestObjects old, later;
      old.commits.from_survivors();
      for (std::int64_t number = 2; number <= others; ++number) {
        old.set(number);
        old.commits.commit();
      }
      later.commits.from_survivors();
      for (std::int64_t number = 2; number <= 3; ++number) {
        later.set(70 + number);
        later.commits.commit();
      }
      const auto of_old = old.commits.hand_over(), of_later = later.commits.hand_over();
      TestObjects next;
      next.commits.adopt(rank == 0 ? handed_over(*of_old, 1) : handed_over(*of_later, 2));
      next.commits.from_survivors();
      next.expect(73);
      EXPECT_EQ(next.commits.number(), 3);
    });
  }
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
