// SPDX-License-Identifier: BSD-3-Clause
// Several processes that save to one path: the good checkpoint stays, one of them is committed, and
// the others are told.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "checkpoint/format/history.h"
#include "checkpoint/format/testing/states.h"
#include "testing/budget.h"

namespace muster::shards {
namespace {

using namespace shards::testing;

/// A process that saves eight bytes of one value, in two halves.
struct TestSaver {
  TestSaver(std::string to, std::byte value, SaverIdentity identity = {})
      : bytes(8, value),
        options{.path = std::move(to), .durable = false, .saver = std::move(identity)},
        plan(plan_save({{"t", "U8", {8}, {box_of({8})}}}, options, {})) {}
  Status finish() const {
    return plan ? finish_save(*plan, {bytes.data()}, "{}", {}) : plan.status();
  }

  std::vector<std::byte> bytes;
  CommitOptions options;
  Result<PlannedSave> plan;
};

/// The value of the checkpoint at `path`; none if the checkpoint is not whole.
std::optional<std::byte> value_at(const std::string& path) {
  const auto index = open_index(path);
  std::vector<std::byte> bytes(8);
  if (!index || !Reader(*index).read({"t", "U8", {8}, {box_of({8})}}, bytes)) return {};
  for (const std::byte each : bytes)
    if (each != bytes.front()) return {};
  return bytes.front();
}

class Savers : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(TestSaver(path, std::byte{1}).finish().ok()); }
  /// Nothing else is left.
  void TearDown() override { EXPECT_TRUE(unfinished_in(folder.path()).empty()); }

  TemporaryFolder folder{"muster-shards-"};
  std::string path = folder.path() + "/c";
};

// spec: S8 two savers meet: the one that began first is refused by name, whichever of them ends
// first, and never costs the other's files or the checkpoint that was there
TEST_F(Savers, TheLaterOneIsCommitted) {
  for (const bool first_ends_first : {true, false}) {
    const TestSaver first(path, std::byte{2}), later(path, std::byte{3});
    if (!first_ends_first) {
      EXPECT_TRUE(later.finish().ok());
    }
    const Status refused = first.finish();
    EXPECT_EQ(refused.code(), Code::refused);
    EXPECT_NE(refused.message().find(path), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("another saver"), std::string::npos) << refused.message();
    EXPECT_EQ(value_at(path), first_ends_first ? std::byte{1} : std::byte{3});
    if (first_ends_first) {
      EXPECT_TRUE(later.finish().ok());
    }
    EXPECT_EQ(value_at(path), std::byte{3});
    ASSERT_TRUE(TestSaver(path, std::byte{1}).finish().ok());
  }
}

// spec: S8 a saver that stood still right before its commit goes on when another one has committed,
// or is in the middle of writing
TEST_F(Savers, ACommitThatComesLateIsNone) {
  auto old = StagingFolder::begin(path, {}, true);
  ASSERT_TRUE(old.ok());
  const TestSaver later(path, std::byte{3});
  EXPECT_EQ(old->commit("{}", false).code(), Code::refused);
  EXPECT_EQ(value_at(path), std::byte{1});
  EXPECT_TRUE(later.finish().ok());
  EXPECT_EQ(old->commit("{}", false).code(), Code::refused);
  old->discard();
  EXPECT_EQ(value_at(path), std::byte{3});
}

// spec: S8 a saver of an epoch older than the last commit's is refused by name, in every rank of
// it; another job's is not, nor that of another launch of the job
TEST_F(Savers, OlderEpochsAreRefused) {
  ASSERT_TRUE(TestSaver(path, std::byte{5}, {.job = "a", .epoch = 5}).finish().ok());
  const Status refused = TestSaver(path, std::byte{4}, {.job = "a", .epoch = 4}).finish();
  EXPECT_EQ(refused.code(), Code::refused);
  EXPECT_NE(refused.message().find("epoch 4"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("epoch 5 of job 'a'"), std::string::npos) << refused.message();
  EXPECT_EQ(value_at(path), std::byte{5});
  on_threads(2, [&](const SavingRanks& ranks) {
    const auto plan = plan_save({}, {.path = path, .saver = {.job = "a", .epoch = 4}}, ranks);
    EXPECT_NE(plan.status().message().find("epoch 5"), std::string::npos);
    EXPECT_EQ(plan.status().code(), Code::refused) << "the same on all ranks";
  });
  EXPECT_TRUE(TestSaver(path, std::byte{6}, {.job = "a", .epoch = 6}).finish().ok());
  EXPECT_TRUE(TestSaver(path, std::byte{7}, {.job = "a", .launch = "2", .epoch = 1}).finish().ok());
  EXPECT_TRUE(TestSaver(path, std::byte{8}, {.job = "b", .epoch = 1}).finish().ok());
  EXPECT_TRUE(TestSaver(path, std::byte{9}).finish().ok());
  EXPECT_EQ(value_at(path), std::byte{9});
}

// spec: S8 a saver of an older epoch gives way to one of a later epoch that is saving now, also
// where it began after that
TEST_F(Savers, OlderEpochsGiveWayToSaversAtWork) {
  const TestSaver old(path, std::byte{2}, {.job = "a", .epoch = 2});
  const TestSaver later(path, std::byte{3}, {.job = "a", .epoch = 3});
  const Status refused = TestSaver(path, std::byte{2}, {.job = "a", .epoch = 2}).finish();
  EXPECT_EQ(refused.code(), Code::refused);
  EXPECT_NE(refused.message().find("epoch 3"), std::string::npos) << refused.message();
  EXPECT_FALSE(old.finish().ok());
  EXPECT_TRUE(later.finish().ok());
  EXPECT_EQ(value_at(path), std::byte{3});
}

// spec: S8 the epochs of two launches are not compared: a rank 0 of an older launch stands still in
// its save, and the requeued job, whose epochs count from 1 again, saves; also where neither has a
// job's name
TEST_F(Savers, EpochsOfTwoLaunchesAreNotCompared) {
  for (const std::string job : {"a", ""}) {
    const SaverIdentity before{.job = job, .launch = "1", .epoch = 3};
    const SaverIdentity requeued{.job = job, .launch = "2", .epoch = 1};
    const TestSaver old(path, std::byte{2}, before);
    const TestSaver anew(path, std::byte{3}, requeued);
    ASSERT_TRUE(anew.plan.ok()) << anew.plan.status().message();
    EXPECT_EQ(old.finish().code(), Code::refused);
    EXPECT_TRUE(anew.finish().ok());
    EXPECT_EQ(value_at(path), std::byte{3});
    EXPECT_TRUE(TestSaver(path, std::byte{5}, requeued).finish().ok());
    EXPECT_EQ(value_at(path), std::byte{5});
  }
}

// spec: S8 a saver of an older launch that wakes up and begins anew is refused by name once the
// requeued job has saved: over what it saved, over a save that it had not ended, or after it has
// loaded what it saved elsewhere
TEST_F(Savers, ALaunchThatWasLeftBehindIsRefused) {
  for (const std::string job : {"a", ""}) {
    for (const std::string how : {"saved", "saves", "loads"}) {
      if (job.empty() && how != "loads") continue;  // they may have only the folder in common
      SCOPED_TRACE(how);
      const SaverIdentity old{.job = job, .launch = how + "1", .epoch = 3};
      SaverIdentity requeued{.job = job, .launch = how + "2", .epoch = 1};
      const auto save = [&](int value, const SaverIdentity& by) {
        return TestSaver(path, static_cast<std::byte>(value), by).finish();
      };
      std::optional<TestSaver> waits;
      if (how == "saved") {
        ASSERT_TRUE(save(2, old).ok());
      }
      if (how == "saves") waits.emplace(path, std::byte{2}, old);
      if (how == "loads") requeued.before = {old.launch};
      ASSERT_TRUE(save(3, requeued).ok());
      const Status refused = save(4, old);
      EXPECT_EQ(refused.code(), Code::refused);
      EXPECT_NE(refused.message().find("a later launch"), std::string::npos) << refused.message();
      EXPECT_EQ(value_at(path), std::byte{3});
      EXPECT_TRUE(save(5, requeued).ok());
      EXPECT_FALSE(save(6, old).ok());
      if (job.empty()) continue;
      EXPECT_TRUE(save(7, {.job = job, .launch = how + "3"}).ok());
      EXPECT_FALSE(save(8, old).ok());
      EXPECT_FALSE(save(9, requeued).ok());
      EXPECT_EQ(value_at(path), std::byte{7});
    }
  }
}

// spec: S8 two programs without a job's name that share a folder save over each other by turns
TEST_F(Savers, ProgramsWithoutAJobsNameTakeTurns) {
  for (int turn = 0; turn < 4; ++turn) {
    const SaverIdentity program{.launch = turn % 2 == 0 ? "1" : "2"};
    EXPECT_TRUE(TestSaver(path, static_cast<std::byte>(turn), program).finish().ok()) << turn;
    EXPECT_EQ(value_at(path), static_cast<std::byte>(turn));
  }
}

// spec: S8 the requeued job is at work: its old self gives way, also where it begins later
TEST_F(Savers, ALaunchThatWasLeftBehindGivesWay) {
  const SaverIdentity old{.job = "a", .launch = "1"};
  const TestSaver requeued(path, std::byte{3}, {.job = "a", .launch = "2", .before = {"1"}});
  EXPECT_EQ(TestSaver(path, std::byte{2}, old).finish().code(), Code::refused);
  EXPECT_TRUE(requeued.finish().ok());
  EXPECT_EQ(value_at(path), std::byte{3});
}

// spec: S8 launches of another job and those that are not told are never left behind; a record
// keeps the launches that came last
TEST_F(Savers, OnlyLaunchesOfOneJobFollowEachOther) {
  const auto save = [&](const SaverIdentity& by) {
    return TestSaver(path, std::byte{2}, by).finish().ok();
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(save({.job = "a", .launch = "1"}));
    EXPECT_TRUE(save({.job = "b", .launch = "2"}));
    EXPECT_TRUE(save({}));
  }
  for (int launch = 0; launch < 100; ++launch)
    EXPECT_TRUE(save({.job = "c", .launch = "c" + std::to_string(launch)}));
  const CommitRecord last = open_index(path)->commit;
  EXPECT_EQ(last.before.size(), 32u);
  EXPECT_EQ(last.before.back(), "c98");
  EXPECT_FALSE(save({.job = "c", .launch = "c98"}));
}

// spec: S8 the commits of versions that told no launch are of another launch
TEST_F(Savers, CommitsWithoutALaunchAreOfAnotherOne) {
  ASSERT_TRUE(TestSaver(path, std::byte{5}, {.job = "a", .epoch = 5}).finish().ok());
  EXPECT_EQ(open_index(path)->commit.launch, "");
  EXPECT_TRUE(TestSaver(path, std::byte{6}, {.job = "a", .launch = "1", .epoch = 1}).finish().ok());
  EXPECT_EQ(open_index(path)->commit.launch, "1");
}

// spec: S8 a saver is seen only with its lock: at no moment does a living one seem to have ended
TEST_F(Savers, ALivingSaverNeverSeemsToHaveEnded) {
  std::atomic<bool> ends = false;
  std::atomic<int> ended = 0;
  std::thread looks([&] {
    while (!ends)
      for (const UnfinishedSave& save : unfinished_saves_of(path))
        if (!save.is_removed && saver_has_ended(save.path) && exists(save.path)) ++ended;
  });
  for (int i = 0; i < muster::testing::test_rounds(300, 3000); ++i) {
    auto saver = StagingFolder::begin(path, {}, true);
    EXPECT_TRUE(saver.ok());
    if (saver.ok()) saver->discard();
  }
  ends = true;
  looks.join();
  EXPECT_EQ(ended, 0);
}

// spec: S11 a folder of the user that is called as the first versions called theirs stays
TEST_F(Savers, TheUsersOwnSavingFolderStays) {
  const std::string mine = path + ".saving";
  const std::vector<std::string> names{"shard-0-model-x.safetensors", "notes.txt"};
  std::filesystem::create_directory(mine);
  for (const std::string& name : names) {
    std::ofstream(mine + "/" + name) << "mine";
    EXPECT_TRUE(TestSaver(path, std::byte{2}).finish().ok());
    EXPECT_TRUE(exists(mine + "/" + name));
  }
  EXPECT_EQ(unfinished_in(folder.path()), std::vector<std::string>{mine});
  std::filesystem::remove_all(mine);
  std::filesystem::create_directory(mine);
  std::ofstream(mine + "/shard-00000-model-00000-of-00001.safetensors") << "left by a kill";
  std::ofstream(mine + "/muster.json.writing") << "{";
  EXPECT_TRUE(TestSaver(path, std::byte{3}).finish().ok());
}

// spec: S8 what a killed saver left is in nobody's way, of a later epoch too, and is removed
TEST_F(Savers, KilledSaversAreInNobodysWay) {
  const pid_t child = ::fork();
  if (child == 0) {
    const TestSaver killed(path, std::byte{7}, {.job = "a", .epoch = 7});
    ::_exit(killed.plan.ok() ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  ASSERT_EQ(status, 0);
  ASSERT_EQ(unfinished_saves_of(path).size(), 1u);
  std::filesystem::create_directory(path + ".saving");  // as the first versions called it
  EXPECT_TRUE(TestSaver(path, std::byte{2}, {.job = "a", .epoch = 2}).finish().ok());
  EXPECT_EQ(value_at(path), std::byte{2});
}

// spec: S8 an own folder that is gone is another saver's doing; files that others put beside are
// not touched by the clean-up of the one that lost
TEST_F(Savers, TheLoserRemovesOnlyItsOwn) {
  const TestSaver loser(path, std::byte{2}), winner(path, std::byte{3});
  EXPECT_FALSE(loser.finish().ok());
  EXPECT_EQ(unfinished_saves_of(path).size(), 1u);
  EXPECT_TRUE(exists(winner.plan->folder()));
  EXPECT_TRUE(winner.finish().ok());
}

// spec: S8 three processes save to one path at once: what is there is whole and what one of those
// says that were told it is saved; the others are refused by name
TEST_F(Savers, ManyAtOnce) {
  for (int round = muster::testing::test_rounds(60, 500); round > 0; --round) {
    std::vector<pid_t> children;
    for (int i = 0; i < 3; ++i) {
      children.push_back(::fork());
      if (children.back() != 0) continue;
      const Status saved = TestSaver(path, static_cast<std::byte>(10 + i)).finish();
      if (!saved && saved.code() != Code::refused) std::fputs(saved.message().c_str(), stderr);
      ::_exit(saved.ok() ? 0 : saved.code() == Code::refused ? 1 : 2);
    }
    std::vector<std::byte> saved;
    for (int i = 0; i < 3; ++i) {
      int status = 0;
      ASSERT_EQ(::waitpid(children[static_cast<std::size_t>(i)], &status, 0),
                children[static_cast<std::size_t>(i)]);
      ASSERT_TRUE(WIFEXITED(status));
      ASSERT_LT(WEXITSTATUS(status), 2);
      if (WEXITSTATUS(status) == 0) saved.push_back(static_cast<std::byte>(10 + i));
    }
    const auto found = value_at(path);
    ASSERT_TRUE(found.has_value());
    ASSERT_NE(std::find(saved.begin(), saved.end(), *found), saved.end())
        << saved.size() << " were told that it is saved";
  }
}

}  // namespace
}  // namespace muster::shards
