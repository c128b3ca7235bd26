// SPDX-License-Identifier: BSD-3-Clause
// Only the file store does this: keys that outlive their writers, the last one out, writers that
// die in the middle.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "core/store/factory.h"
#include "core/store/file/file_log.h"
#include "testing/budget.h"
#include "testing/fuzz.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class FileStoreTest : public ::testing::Test {
 protected:
  std::shared_ptr<Store> open(int world_size = -1) {
    auto store = make_file_store(path, world_size, muster::testing::kMustHappen);
    EXPECT_TRUE(store.ok()) << store.status().message();
    return *store;
  }
  std::string contents() const {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  testing::ScratchFolder folder;
  const std::string directory = folder.path(), path = folder.file("store");
};

// spec: C5 keys survive re-opening the same file
TEST_F(FileStoreTest, KeysSurvive) {
  {
    const auto store = open();
    ASSERT_TRUE(store->set("key", "value").ok());
    ASSERT_TRUE(store->add("count", 41).ok());
    ASSERT_TRUE(store->queue_push("queue", "waiting").ok());
  }
  const auto store = open();
  EXPECT_EQ(*store->get("key"), "value");
  EXPECT_EQ(*store->add("count", 1), 42);
  EXPECT_EQ(*store->queue_pop("queue"), "waiting");
  EXPECT_EQ(*store->num_keys(), 2);
}

// spec: C5 world_size: the last of its users removes the file; without one it stays
TEST_F(FileStoreTest, TheLastOfItsUsersRemovesTheFile) {
  auto first = open(2);
  ASSERT_TRUE(first->set("key", "value").ok());
  first.reset();
  EXPECT_TRUE(std::filesystem::exists(path));
  auto second = open(2);
  EXPECT_EQ(*second->get("key"), "value");
  const auto clone = *second->clone();  // the same user
  second.reset();
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_EQ(*clone->get("key"), "value");
}

// spec: C5 the last of its users removes the file, counted over clones
TEST_F(FileStoreTest, ClonesAreOneUser) {
  {
    const auto store = open(1);
    const auto clone = *store->clone();
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

// spec: C5 a path that cannot be one is named
TEST_F(FileStoreTest, BadPathsAreNamed) {
  const Status none = make_file_store(directory + "/none/store").status();
  EXPECT_NE(none.message().find("does not exist"), std::string::npos) << none.message();
  const Status folder = make_file_store(directory).status();
  EXPECT_FALSE(folder.ok());
  EXPECT_NE(folder.message().find(directory), std::string::npos) << folder.message();
}

// spec: W3 a store's file is this user's alone to write, and no link: else it is refused by name
TEST_F(FileStoreTest, FilesOfOthersAreRefused) {
  const auto refused = [&](const std::string& at, const std::string& why) {
    const Status status = make_file_store(at).status();
    EXPECT_EQ(status.code(), Code::store);
    EXPECT_NE(status.message().find("the store's file " + at), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  open();
  ::chmod(path.c_str(), 0662);
  refused(path, "mode 0662");
  ::chmod(path.c_str(), 0644);
  EXPECT_TRUE(make_file_store(path).ok()) << "others may read it if its owner wants that";
  std::filesystem::create_symlink(path, folder.file("link"));
  refused(folder.file("link"), "symbolic link");
  if (::geteuid() != 0) return;
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  refused(path, "belongs to user 65534");
}

// A writer that died in the middle leaves any number of the bytes of its last transaction.
// spec: C5 whole transactions survive, broken ones vanish, at every cut
TEST_F(FileStoreTest, CutAtEveryByte) {
  std::size_t whole = 0;
  {
    const auto store = open();
    ASSERT_TRUE(store->set("before", "value").ok());
    whole = contents().size();
    ASSERT_TRUE(
        store->multi_set(std::vector<std::string>{"a", "b"}, std::vector<std::string>{"1", "2"})
            .ok());
  }
  const std::string all = contents();
  for (std::size_t cut = 0; cut <= all.size(); ++cut) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << all.substr(0, cut);
    const auto store = open();
    const bool a = *store->check(std::vector<std::string>{"a"}),
               b = *store->check(std::vector<std::string>{"b"});
    EXPECT_EQ(a, cut == all.size()) << cut;
    EXPECT_EQ(b, a) << cut;
    EXPECT_EQ(*store->check(std::vector<std::string>{"before"}), cut >= whole) << cut;
    ASSERT_TRUE(store->set("after", std::to_string(cut)).ok());
    EXPECT_EQ(*open()->get("after"), std::to_string(cut));
  }
}

// spec: C5 damaged files are reported or cut, never believed and never a crash
TEST_F(FileStoreTest, DamagedFiles) {
  {
    const auto store = open();
    for (int i = 0; i < 5; ++i)
      ASSERT_TRUE(store->set("key" + std::to_string(i), std::string(20, 'x')).ok());
  }
  const std::string all = contents();
  testing::Fuzz fuzz(5);
  for (int round = 0; round < testing::test_rounds(500, 10'000); ++round) {
    const std::string bad =
        fuzz.one_in(8) ? all.substr(0, 16) + fuzz.noise(200) : fuzz.damaged(all);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bad;
    const auto store = make_file_store(path, -1, muster::testing::kMustHappen);
    if (!store.ok()) continue;
    const auto keys = (*store)->list_keys();
    EXPECT_LE(keys.ok() ? keys->size() : 0, 5u);
  }
}

// spec: C5 many processes write at once, one is killed again and again: nothing is lost, nothing
// counted twice
TEST_F(FileStoreTest, KilledWriters) {
  const auto store = open();
  int reported = 0;
  for (int round = 0; round < 10; ++round) {
    int lines[2];
    ASSERT_EQ(::pipe(lines), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const auto mine = make_file_store(path, -1, muster::testing::kMustHappen);
      for (;;) {
        if (!(*mine)->add("count", 1).ok() || ::write(lines[1], "x", 1) != 1) ::_exit(1);
      }
    }
    ::close(lines[1]);
    char byte;
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(::read(lines[0], &byte, 1), 1);
      ASSERT_TRUE(store->add("other", 1).ok());
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    reported += 20;
    while (::read(lines[0], &byte, 1) == 1) ++reported;
    ::close(lines[0]);
  }
  const auto count = *store->add("count", 0);
  EXPECT_GE(count, reported);
  EXPECT_LE(count, reported + 10)
      << "each kill may hide one addition that was made and not reported";
  EXPECT_EQ(*store->add("other", 0), 200);
}

// spec: C7 a stopped process that holds the lock is named as such at the deadline
TEST_F(FileStoreTest, LockedByAnother) {
  const auto store = open();
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  ASSERT_EQ(::fcntl(file, F_OFD_SETLK, &whole), 0);
  store->set_timeout(milliseconds(50));
  const Status status = store->set("key", "value");
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_NE(status.message().find("locked"), std::string::npos) << status.message();
  ::close(file);
  EXPECT_TRUE(store->set("key", "value").ok());
}

// spec: C14 all_gather in a file: two members with one index, or different numbers of members, are
// told
TEST_F(FileStoreTest, MeetingsNoticeMisuse) {
  const auto log = *FileLog::open(path);
  const auto gather = [](int index, int members) {
    return FileMeeting({.op = StoreOp::all_gather,
                        .index = index,
                        .members = members,
                        .keys = {"key"},
                        .values = {"value"}});
  };
  FileMeeting zero = gather(0, 2), twice = gather(0, 2), three = gather(1, 3), one = gather(1, 2);
  ASSERT_TRUE(log->transact(TimePoint::max(),
                            [&](FileLog::Transaction& file) {
                              EXPECT_TRUE(zero.arrive(file));
                              EXPECT_FALSE(twice.arrive(file));
                              EXPECT_EQ(twice.reply().status.code(), Code::mismatch);
                              EXPECT_FALSE(three.arrive(file));
                              EXPECT_EQ(three.reply().status.code(), Code::mismatch);
                              EXPECT_FALSE(zero.finished(file.map()));
                              EXPECT_TRUE(one.arrive(file));
                              EXPECT_TRUE(zero.finished(file.map()));
                              EXPECT_TRUE(one.finished(file.map()));
                              EXPECT_EQ(file.map().size(), 4u)
                                  << "the counter, how it ended, and what each gave: for those "
                                     "that have still to read it";
                            })
                  .ok());
  EXPECT_EQ(zero.reply().values.size(), 2u);
}

// Each member writes once, when it comes; how the meeting ended all of them read without the lock.
TEST_F(FileStoreTest, MembersOfAMeetingWriteOnlyWhenTheyCome) {
  constexpr int kMembers = 6;
  std::vector<std::thread> members;
  for (int index = 0; index < kMembers; ++index) {
    members.emplace_back([&, store = open(), index] {
      const auto all = store->all_gather("key", index, kMembers, std::to_string(index));
      ASSERT_TRUE(all.ok()) << all.status().message();
      EXPECT_EQ(*all, (std::vector<std::string>{"0", "1", "2", "3", "4", "5"}));
    });
  }
  for (auto& member : members) member.join();
  const std::string file = contents();
  int transactions = 0;
  for (std::size_t at = 16; at < file.size(); ++transactions) {
    std::uint32_t bytes = 0;
    std::memcpy(&bytes, file.data() + at, sizeof bytes);
    at += 8 + bytes;
  }
  EXPECT_EQ(transactions, kMembers);
}

// The texts of a meeting are forgotten once all members have long read them.
TEST_F(FileStoreTest, OldMeetingsAreForgotten) {
  const auto store = open();
  const auto entries = [&] {
    auto log = FileLog::open(path);
    std::size_t count = 0;
    EXPECT_TRUE((*log)
                    ->transact(TimePoint::max(),
                               [&](FileLog::Transaction& file) { count = file.map().size(); })
                    .ok());
    return count;
  };
  const auto meet = [&](int times) {
    for (int i = 0; i < times; ++i) {
      ASSERT_TRUE(store->barrier("key", 1).ok());
      ASSERT_TRUE(store->all_gather("key", 0, 1, "value").ok());
    }
  };
  meet(50);
  const auto before = entries();
  meet(50);
  EXPECT_EQ(entries(), before);
}

// spec: C6 PrefixStore: prefixes nest and keep apart what has the same name
TEST(PrefixStore, Nests) {
  const auto base = make_hash_store();
  const auto red = make_prefix_store("red", base), blue = make_prefix_store("blue", base),
             deep = make_prefix_store("deep", red);
  ASSERT_TRUE(red->set("key", "1").ok());
  ASSERT_TRUE(blue->set("key", "2").ok());
  ASSERT_TRUE(deep->set("key", "3").ok());
  EXPECT_EQ(*base->get("red/key"), "1");
  EXPECT_EQ(*base->get("blue/key"), "2");
  EXPECT_EQ(*base->get("red/deep/key"), "3");
  EXPECT_EQ(*red->num_keys(), 2);
  EXPECT_EQ(*deep->num_keys(), 1);
  EXPECT_EQ(*blue->list_keys(), std::vector<std::string>{"key"});
}

// spec: C6 underlying_store
TEST(PrefixStore, UnderlyingStore) {
  const auto base = make_hash_store();
  const auto outer = make_prefix_store("outer", base);
  const auto inner = make_prefix_store("inner", outer);
  EXPECT_EQ(underlying_store(*inner), outer);
  EXPECT_EQ(underlying_store(*outer), base);
  EXPECT_EQ(underlying_store(*base), nullptr);
}

// spec: C13 timeouts of a prefix store are those of the store under it
TEST(PrefixStore, Timeouts) {
  const auto base = make_hash_store(seconds(7));
  const auto prefixed = make_prefix_store("prefix", base);
  EXPECT_EQ(prefixed->timeout(), seconds(7));
  prefixed->set_timeout(seconds(8));
  EXPECT_EQ(base->timeout(), seconds(8));
}

}  // namespace
}  // namespace muster::store
