// SPDX-License-Identifier: BSD-3-Clause
// The checkpoints of a folder: their order, and what may be removed.

#include "checkpoint/format/history.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/testing/states.h"

namespace muster::shards {
namespace {

using namespace shards::testing;

Status save_step(const std::string& folder, std::int64_t step, int keep_last) {
  return save_bytes(std::vector<std::byte>(8), {.path = folder + "/step-" + std::to_string(step),
                                                .step = step,
                                                .keep_last = keep_last,
                                                .durable = false});
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& each : std::filesystem::directory_iterator(folder))
    names.push_back(each.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// spec: S7.keep keep the last n: the newest ones, never fewer
TEST(History, KeepsTheLast) {
  const TemporaryFolder folder("muster-shards-");
  for (int step = 0; step < 6; ++step) {
    save_as(Way::ddp, 2,
            {.path = folder.path() + "/step-" + std::to_string(step),
             .step = step,
             .keep_last = 2,
             .durable = false});
    const auto all = checkpoints_in(folder.path());
    ASSERT_EQ(all.size(), std::min<std::size_t>(2, static_cast<std::size_t>(step) + 1));
    EXPECT_EQ(open_index(all.back())->step, step);
  }
  std::filesystem::create_directory(folder.path() + "/other");
  EXPECT_EQ(checkpoints_in(folder.path()).size(), 2u);
  EXPECT_TRUE(unfinished_in(folder.path()).empty());
}

// spec: S7 the order is that of the commits, whatever the times of the files are
TEST(History, OrderIsThatOfTheCommits) {
  const TemporaryFolder folder("muster-shards-");
  const std::string first = folder.path() + "/b", second = folder.path() + "/a";
  ASSERT_TRUE(save_small(first).ok());
  ASSERT_TRUE(save_small(second).ok());
  std::filesystem::last_write_time(
      first + "/muster.json",
      std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(checkpoints_in(folder.path()), (std::vector{first, second}));
  ASSERT_TRUE(save_small(folder.path() + "/c", 2).ok());
  EXPECT_EQ(checkpoints_in(folder.path()), (std::vector{second, folder.path() + "/c"}));
}

// spec: S7 the newest is the one of the highest step, and among equal steps the one that was
// committed last: a save of an older step that comes late does not become the newest, and does not
// cost the newest one
TEST(History, StepsComeFirst) {
  const TemporaryFolder folder("muster-shards-");
  const auto path = [&](const std::string& name) { return folder.path() + "/" + name; };
  for (const int step : {100, 200, 90}) ASSERT_TRUE(save_step(folder.path(), step, 0).ok());
  ASSERT_TRUE(save_small(path("no-step")).ok());
  EXPECT_EQ(checkpoints_in(folder.path()),
            (std::vector{path("step-90"), path("step-100"), path("step-200"), path("no-step")}));
  ASSERT_TRUE(save_step(folder.path(), 95, 2).ok());
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"no-step", "step-200", "step-95"}));
}

// spec: S11 keep_last removes only what muster wrote: not what users put into a checkpoint's
// folder, no copy of a checkpoint, no damaged one, and no folder of another kind
TEST(History, OnlyOwnFilesAreRemoved) {
  const TemporaryFolder folder("muster-shards-");
  const auto path = [&](const std::string& name) { return folder.path() + "/" + name; };
  for (int step = 1; step <= 3; ++step) ASSERT_TRUE(save_step(folder.path(), step, 0).ok());
  std::ofstream(path("step-1") + "/scores.txt") << "text";
  std::filesystem::create_directories(path("step-2") + "/plots/day");
  std::filesystem::copy(path("step-1"), path("best"), std::filesystem::copy_options::recursive);
  std::filesystem::create_directory(path("mine.saving"));
  std::ofstream(path("mine.saving") + "/shard-notes") << "text";
  std::ofstream(path("step-3") + "/muster.json", std::ios::app) << " ";
  for (int step = 4; step <= 6; ++step) ASSERT_TRUE(save_step(folder.path(), step, 1).ok());
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"best", "mine.saving", "step-1",
                                                               "step-2", "step-3", "step-6"}));
  EXPECT_EQ(names_in(path("step-1")), std::vector<std::string>{"scores.txt"});
  EXPECT_EQ(names_in(path("step-2")), std::vector<std::string>{"plots"});
  EXPECT_TRUE(is_whole(path("best")));
  EXPECT_EQ(names_in(path("mine.saving")).size(), 1u);
}

// spec: S7 what killed saves left is removed when later ones have been committed; what a living
// process writes now is not
TEST(History, FoldersOfKilledSavesArePruned) {
  const TemporaryFolder folder("muster-shards-");
  const std::string killed = folder.path() + "/killed", live = folder.path() + "/live";
  const pid_t child = ::fork();
  if (child == 0) ::_exit(StagingFolder::begin(killed, {}, true).ok() ? 0 : 1);
  ::waitpid(child, nullptr, 0);
  auto running = StagingFolder::begin(live, {}, true);
  ASSERT_TRUE(running.ok()) << running.status().message();
  EXPECT_EQ(unfinished_in(folder.path()).size(), 2u);
  for (int step = 1; step <= 2; ++step) ASSERT_TRUE(save_step(folder.path(), step, 3).ok());
  EXPECT_EQ(unfinished_in(folder.path()), std::vector{running->path()});
  running->discard();
}

// spec: S7 checkpoints of the first format, which have a time and no number, are read, and are
// older than all others
TEST(History, TheFirstFormatIsRead) {
  const TemporaryFolder folder("muster-shards-");
  const auto first_format = [&](const std::string& name, std::int64_t time) {
    const std::string path = folder.path() + "/" + name, file = path + "/muster.json";
    ASSERT_TRUE(save_small(path).ok());
    const std::string text = *read_text(file, 1'000'000),
                      digest = open_index(path)->tensors.at("t").pieces.front().blocks;
    std::string body = "{\n \"committed_ns\": " + std::to_string(time) + ",\n" +
                       text.substr(text.find("\n },\n") + 5,
                                   text.rfind(",\n \"digest\"") - text.find("\n },\n") - 5);
    body.replace(body.find("checkpoint 2"), 12, "checkpoint 1");
    body.replace(body.find("\"blocks\""), 8, "\"digest\"");
    std::ofstream(file, std::ios::binary)
        << body << ",\n \"digest\": \"" << digest_of(body) << "\"\n}\n";
    EXPECT_TRUE(is_whole(path)) << open_index(path).status().message();
    EXPECT_EQ(open_index(path)->tensors.at("t").pieces.front().digest, digest);
  };
  first_format("old", 2'000);
  first_format("oldest", 1'000);
  const std::string fresh = folder.path() + "/a";
  ASSERT_TRUE(save_small(fresh).ok());
  EXPECT_EQ(checkpoints_in(folder.path()),
            (std::vector{folder.path() + "/oldest", folder.path() + "/old", fresh}));
  ASSERT_TRUE(save_small(fresh, 2).ok());
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"a", "old"}));
}

// spec: S7 a damaged record stands last: a program that loads the last is told, and does not get an
// older one
TEST(History, ADamagedRecordIsNotPassedOver) {
  const TemporaryFolder folder("muster-shards-");
  for (int step = 1; step <= 2; ++step) ASSERT_TRUE(save_step(folder.path(), step, 0).ok());
  const std::string newest = folder.path() + "/step-2", file = newest + "/muster.json";
  const std::string good = *read_text(file, 1'000'000);
  for (const std::string field : {"number", "step"}) {
    std::string bad = good;
    char& digit = bad[good.find_first_of("0123456789", good.find('"' + field + "\": "))];
    digit = digit == '0' ? '1' : '0';
    std::ofstream(file, std::ios::binary) << bad;
    EXPECT_EQ(checkpoints_in(folder.path()).back(), newest) << field;
    EXPECT_FALSE(open_index(newest).ok());
  }
}

}  // namespace
}  // namespace muster::shards
