// SPDX-License-Identifier: BSD-3-Clause
// How ranks find each other by a file or a given store.
#include "core/store/testing/rendezvous_job.h"

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/base/process/process_start.h"
#include "core/store/file/file_store.h"

namespace muster::store {
namespace {

using namespace rendezvous_test;

// spec: B7.created B7.removed file:// with ranks: created when missing, removed by the last out
// spec: B14 file:// removes the file at the end
// spec: B2 an explicit store: links listen where they reach the store
TEST(Rendezvous, OverAGivenStoreTellsWhereItIs) {
  TcpStoreOptions serving;
  serving.host = "127.0.0.1";
  serving.port = 0;
  serving.is_server = true;
  const auto tcp = make_tcp_store(serving);
  ASSERT_TRUE(tcp.ok()) << tcp.status().message();
  RendezvousOptions options;
  options.rank = 0;
  options.world_size = 1;
  const auto below_prefixes =
      rendezvous_over(make_prefix_store("a", make_prefix_store("b", *tcp)), options);
  ASSERT_TRUE(below_prefixes.ok()) << below_prefixes.status().message();
  EXPECT_EQ(below_prefixes->host, "127.0.0.1");
  const auto in_memory = rendezvous_over(make_hash_store(), options);
  ASSERT_TRUE(in_memory.ok()) << in_memory.status().message();
  EXPECT_EQ(in_memory->host, "");
}

TEST(Rendezvous, FileWithRanks) {
  const testing::ScratchFolder directory;
  const std::string path = directory.path() + "/job";
  {
    const Results results = on_threads(ranks_of("file://" + path, 4, true));
    expect_met(results);
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  std::ofstream(path).close();  // an empty file is as good as none
  expect_met(on_threads(ranks_of("file://" + path, 2, true)));
  EXPECT_FALSE(std::filesystem::exists(path));
}

// spec: B6.file file:// without ranks: first come, first numbered
TEST(Rendezvous, FileAssignsRanks) {
  const testing::ScratchFolder directory;
  expect_met(on_threads(ranks_of("file://" + directory.path() + "/job", 4, false)));
  expect_met(on_threads(ranks_of("file://" + directory.path() + "/job?world_size=3", 3, false)));
}

// spec: B7.directory the directory must exist
TEST(Rendezvous, FileNeedsItsDirectory) {
  const testing::ScratchFolder directory;
  const Status status =
      rendezvous({"file://" + directory.path() + "/none/job", 0, 1, "", kShort}).status();
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(mentions(status, directory.path() + "/none")) << status.message();
}

// spec: B7 processes, several times with one file, nobody waiting for the others before it leaves
TEST(Rendezvous, FileAgainAndAgain) {
  const Environment environment({});
  const testing::ScratchFolder directory;
  const std::string method = "file://" + directory.path() + "/job";
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<Child>([&, rank] {
      for (int round = 0; round < 10; ++round) {
        const auto joined = rendezvous({method, rank, 3, "", kLong});
        if (!joined.ok())
          std::fprintf(stderr, "rank %d round %d: %s\n", rank, round,
                       joined.status().message().c_str());
        if (!joined.ok()) return false;
      }
      return true;
    }));
  }
  for (auto& rank : ranks) EXPECT_TRUE(rank->succeeded());
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/job"));
}

// spec: B7.stale a stale file from an earlier run is detected and reported, never a hang
TEST(Rendezvous, FileLeftOverIsReported) {
  const testing::ScratchFolder directory;
  const std::string path = directory.path() + "/job", method = "file://" + path;
  Child earlier([&] {
    const auto joined = rendezvous({method, 0, 1, "", kLong});
    if (joined.ok()) ::_exit(0);  // without leaving
    return false;
  });
  ASSERT_TRUE(earlier.succeeded());
  ASSERT_TRUE(std::filesystem::exists(path));
  const TimePoint begin = steady_clock().now();
  const Status status = rendezvous({method, 0, 1, "", kLong}).status();
  EXPECT_EQ(status.code(), Code::store);
  EXPECT_TRUE(mentions(status, path)) << status.message();
  EXPECT_TRUE(mentions(status, "earlier run")) << status.message();
  EXPECT_TRUE(mentions(status, "remove the file")) << status.message();
  EXPECT_LT(steady_clock().now() - begin, seconds(30));
  // And one whose users were killed while they waited.
  std::filesystem::remove(path);
  Child half([&] { return rendezvous({method, 0, 2, "", kLong}).ok(); });
  while (!std::filesystem::exists(path) || std::filesystem::file_size(path) < 200)
    std::this_thread::yield();
  half.kill();
  EXPECT_EQ(rendezvous({method, 1, 2, "", kLong}).status().code(), Code::store);
}

// spec: B7 a stale file is detected also where another process has got the number of one that used
// it
TEST(Rendezvous, FileOfAProcessWhoseNumberWasUsedAgainIsReported) {
  // The two begin in different ticks of the clock by which the kernel tells them apart.
  const auto tick = [] {
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    const std::int64_t ticks = ::sysconf(_SC_CLK_TCK);
    return static_cast<std::uint64_t>(now.tv_sec * ticks + now.tv_nsec * ticks / 1'000'000'000);
  };
  while (tick() <= process_start(::getpid()).value() + 1) std::this_thread::yield();
  const testing::ScratchFolder directory;
  const std::string path = directory.path() + "/job", method = "file://" + path;
  Child earlier([&] {
    const auto joined = rendezvous({method, 0, 1, "", kLong});
    if (joined.ok()) ::_exit(0);  // without leaving
    return false;
  });
  ASSERT_TRUE(earlier.succeeded());
  ASSERT_TRUE(std::filesystem::exists(path));
  {
    auto log = FileLog::open(path);
    ASSERT_TRUE(log.ok());
    const std::string key = std::string(1, kFileOwnKey) + "members";
    const Status changed = (*log)->transact(TimePoint::max(), [&](FileLog::Transaction& file) {
      std::string member =
          *file.find(key);  // begins with an id, the number of its process, and when it came
      const std::int64_t mine = ::getpid(), long_ago = -1000;
      std::memcpy(member.data() + 8, &mine, sizeof mine);
      std::memcpy(member.data() + 16, &long_ago, sizeof long_ago);
      file.put(key, member);
    });
    ASSERT_TRUE(changed.ok());
  }
  const Status status = rendezvous({method, 0, 1, "", kLong}).status();
  EXPECT_EQ(status.code(), Code::store);
  EXPECT_TRUE(mentions(status, "earlier run")) << status.message();
}

// spec: B7 a file that is no store is left alone and reported
TEST(Rendezvous, FileOfSomebodyElseIsReported) {
  const testing::ScratchFolder directory;
  const std::string path = directory.path() + "/notes";
  std::ofstream(path) << "this is my diary";
  const Status status = rendezvous({"file://" + path, 0, 1, "", kShort}).status();
  EXPECT_EQ(status.code(), Code::store);
  EXPECT_TRUE(mentions(status, "not a store's file")) << status.message();
  EXPECT_EQ(std::filesystem::file_size(path), 16u);
}

// spec: B1 file:// names the ranks that did not join; nothing is left behind
TEST(Rendezvous, FileNamesTheRanksThatDidNotJoin) {
  const testing::ScratchFolder directory;
  auto ranks = ranks_of("file://" + directory.path() + "/job", 3, true, kInVain);
  ranks.erase(ranks.begin() + 1);
  for (const auto& result : on_threads(ranks))
    EXPECT_EQ(result.status().ranks(), std::vector<int>{1}) << result.status().message();
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/job"));
}

// spec: B8 group_name keeps jobs that share one file apart
TEST(Rendezvous, GroupNamesShareAFile) {
  const testing::ScratchFolder directory;
  const std::string method = "file://" + directory.path() + "/job";
  {
    auto all = ranks_of(method, 2, true, kLong, "red");
    const auto blue = ranks_of(method, 2, true, kLong, "blue");
    all.insert(all.end(), blue.begin(), blue.end());
    const Results results = on_threads(all);
    expect_met({results.begin(), results.begin() + 2});
    expect_met({results.begin() + 2, results.end()});
    ASSERT_TRUE(results[0]->store->set("colour", "red").ok());
    EXPECT_FALSE(*results[2]->store->check(std::vector<std::string>{"colour"}));
  }
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/job"));
}

// spec: W3 a meeting file through a link, of another user or open to all is refused by name
TEST(Rendezvous, FilesThatOthersCouldHaveLaidAreRefused) {
  const testing::ScratchFolder directory;
  const auto refused = [&](const std::string& path, const std::string& why) {
    const Status status = rendezvous({"file://" + path, 0, 1, "", kShort}).status();
    EXPECT_FALSE(status.ok()) << path;
    EXPECT_TRUE(mentions(status, path) && mentions(status, why)) << status.message();
  };
  std::ofstream(directory.file("mine")) << "";
  std::filesystem::create_symlink(directory.file("mine"), directory.file("link"));
  refused(directory.file("link"), "symbolic link");
  std::ofstream(directory.file("open")) << "";
  ::chmod(directory.file("open").c_str(), 0666);
  refused(directory.file("open"), "chmod go-w");
  if (::geteuid() != 0) return;
  std::ofstream(directory.file("theirs")) << "";
  ASSERT_EQ(::chown(directory.file("theirs").c_str(), 65534, 65534), 0);
  refused(directory.file("theirs"), "belongs to user 65534");
}

}  // namespace
}  // namespace muster::store
