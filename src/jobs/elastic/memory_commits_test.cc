// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/memory_commits.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <mutex>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/collectives.h"
#include "muster/errors.h"
#include "testing/thrown.h"

namespace muster::elastic {
namespace {

using checkpoint::CheckpointItem;

at::Tensor whole_at(std::int64_t number) { return at::arange(35, at::kFloat) + 100 * number; }

/// This rank's stretch of a tensor, a part of another type, and what all have alike.
struct TestParts {
  at::Tensor stretch, box, same;
  std::vector<CheckpointItem> items;

  TestParts(int rank, int size) {
    const std::int64_t each = (35 + size - 1) / size;
    first = std::min<std::int64_t>(35, each * rank);
    stretch = at::zeros({std::min(each, 35 - first)}, at::kFloat);
    box = at::zeros({rank == 0 ? 3 : 0, 2}, at::kDouble);
    same = at::zeros({5}, at::kLong);
    items = {checkpoint::whole_item("same", same),
             checkpoint::stretch_item("stretch", stretch, {5, 7}, first),
             checkpoint::box_item("box", box, {3, 2}, {0, 0})};
  }
  void set(std::int64_t number) {
    stretch.copy_(whole_at(number).narrow(0, first, stretch.numel()));
    box.fill_(static_cast<double>(number));
    same.fill_(number);
  }
  void expect(std::int64_t number) const {
    EXPECT_SAME(stretch, whole_at(number).narrow(0, first, stretch.numel()));
    EXPECT_SAME(box, at::full_like(box, static_cast<double>(number)));
    EXPECT_SAME(same, at::full_like(same, number));
  }
  std::int64_t first = 0;
};

/// The launcher's part: memory of ranks that have ended.
class HeldMemory {
 public:
  void hold(int rank, const MemoryCommits& commits) {
    const std::lock_guard lock(mutex_);
    held_.resize(std::max(held_.size(), static_cast<std::size_t>(rank) + 1));
    for (const int file : commits.files())
      held_[static_cast<std::size_t>(rank)].emplace_back(::fcntl(file, F_DUPFD_CLOEXEC, 0));
  }
  std::vector<Descriptor> take(int rank) {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(rank) < held_.size()
               ? std::move(held_[static_cast<std::size_t>(rank)])
               : std::vector<Descriptor>();
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<Descriptor>> held_;
};

/// The ranks of several nodes make commits 1 to 3, and all end.
void commit_on(int ranks, int per_node, HeldMemory& held) {
  testing::on_ranks(ranks, [&](int rank) {
    TestParts parts(rank, ranks);
    MemoryCommits commits;
    EXPECT_FALSE(commits.find());
    commits.begin_epoch(1, rank / per_node, {});
    for (std::int64_t number = 1; number <= 3; ++number) {
      parts.set(number);
      commits.write(number, {parts.items, "values", 1});
      barrier();
      commits.agreed();
    }
    parts.set(9);
    const FoundCommit last = commits.last();
    EXPECT_EQ(last.id, (CommitId{1, 3}));
    commits.fill_here(last, parts.items);
    parts.expect(3);
    held.hold(rank, commits);
  });
}

void restore_on(int ranks, HeldMemory& held) {
  testing::on_ranks(ranks, [&](int rank) {
    TestParts parts(rank, ranks);
    MemoryCommits commits;
    commits.adopt(held.take(rank));
    const auto found = commits.find();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->id, (CommitId{1, 3}));
    EXPECT_EQ(found->values, "values");
    EXPECT_EQ(found->index.tensors.at("stretch").sizes, (shards::Extent{5, 7}));
    commits.fill(*found, parts.items);
    parts.expect(3);
    // The next epoch needs nothing of the one before.
    commits.begin_epoch(2, 0, found->id);
    commits.write(3, {parts.items, "values", 1});
    barrier();
    commits.agreed();
    EXPECT_EQ(commits.files().size(), 2U);
    EXPECT_EQ(commits.find()->id, (CommitId{2, 3}));
  });
}

// spec: L7 any number of ranks restores what another number had: fewer, as many and more
TEST(MemoryCommits, AnyNumberOfRanksRestores) {
  for (const int after : {1, 2, 3, 5}) {
    HeldMemory held;
    commit_on(3, 3, held);
    // Fewer ranks get what is left: all memory is of one node.
    for (int rank = after; rank < 3; ++rank) {
      HeldMemory one;
      MemoryCommits rest;
      rest.adopt(held.take(rank));
      held.hold(0, rest);
    }
    restore_on(after, held);
  }
}

// spec: L7, L9 a rank that leaves while the next epoch begins still has its part of the last commit
TEST(MemoryCommits, ARankThatLeavesBetweenEpochsHasItsLastCommit) {
  testing::on_ranks(2, [&](int rank) {
    TestParts parts(rank, 2);
    MemoryCommits commits;
    EXPECT_FALSE(commits.has_last());
    commits.begin_epoch(1, 0, {});
    parts.set(1);
    commits.write(1, {parts.items, "values", 1});
    barrier();
    commits.agreed();
    // The second is whole, but this rank hears only in the next epoch that it was made.
    parts.set(2);
    commits.write(2, {parts.items, "values", 1});
    EXPECT_EQ(commits.last().id, (CommitId{1, 1}));
    const auto found = commits.find();
    ASSERT_TRUE(found);
    commits.begin_epoch(2, 0, found->id);
    parts.set(9);
    const FoundCommit last = commits.last();
    EXPECT_EQ(last.id, (CommitId{1, 2}));
    commits.fill_here(last, parts.items);
    parts.expect(2);
  });
}

// spec: L7 a rank that has got a commit from others has no part of its own before its first commit
TEST(MemoryCommits, WhatOthersGaveIsNoCommitOfThisProcess) {
  HeldMemory held;
  commit_on(2, 1, held);
  held.take(1);
  testing::on_ranks(2, [&](int rank) {
    MemoryCommits commits;
    commits.adopt(held.take(rank));
    EXPECT_TRUE(commits.find());
    EXPECT_FALSE(commits.has_last());
    EXPECT_HAS(testing::message_of<DistError>([&] { (void)commits.last(); }), "no commit of this");
  });
}

// spec: L7 a node is lost with all that it had: the next one has the copies
TEST(MemoryCommits, ALostNodeIsRestoredFromItsPartner) {
  for (const int lost : {0, 1, 2}) {
    HeldMemory held;
    commit_on(6, 2, held);
    held.take(2 * lost);
    held.take(2 * lost + 1);
    restore_on(6, held);
  }
}

// spec: L7 two neighbouring nodes are lost: every rank is told what is gone, and then begins anew
TEST(MemoryCommits, TwoLostNeighboursAreTooMany) {
  HeldMemory held;
  commit_on(3, 1, held);
  held.take(1);
  held.take(2);
  testing::on_ranks(3, [&](int rank) {
    MemoryCommits commits;
    commits.adopt(held.take(rank));
    const auto failure = testing::message_of<DistError>([&] { (void)commits.find(); });
    EXPECT_HAS(failure, "what rank 1 of 3 had is gone");
    EXPECT_FALSE(commits.find());
  });
}

}  // namespace
}  // namespace muster::elastic
