// SPDX-License-Identifier: BSD-3-Clause
// One suite over every kind of store: what holds for one holds for all. A property of only one kind
// is tested in a file of its own. store_meetings_suite_test.cc has its queues and meetings.

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <random>

#include "core/store/testing/store_kinds.h"
#include "testing/budget.h"

namespace muster::store::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

INSTANTIATE_TEST_SUITE_P(
    Kinds, StoreSuite,
    ::testing::Values(Named{"hash", [] { return std::make_unique<HashKind>(); }},
                      Named{"prefix", [] { return std::make_unique<PrefixKind>(); }},
                      Named{"tcp", [] { return std::make_unique<TcpKind>(true); }},
                      Named{"tls", [] { return std::make_unique<TcpKind>(false); }},
                      Named{"file", [] { return std::make_unique<FileKind>(); }},
                      Named{"etcd", [] { return std::make_unique<EtcdKind>(); }}),
    [](const auto& info) { return info.param.name; });

// spec: C1.hash[hash] C1.file[file] C1.tcp[tcp] C1.prefix[prefix] C1.etcd[etcd] every kind says
// which it is
// spec: L11.store[etcd] EtcdStore with all of C: this suite over it
TEST_P(StoreSuite, NamesItsKind) { EXPECT_EQ(user()->kind(), kind_in_words()); }

// spec: C7.set set overwrites, get returns what was set
TEST_P(StoreSuite, SetOverwrites) {
  const auto store = user();
  ASSERT_OK(store->set("key", "first"));
  EXPECT_EQ(*store->get("key"), "first");
  ASSERT_OK(store->set("key", "second"));
  EXPECT_EQ(*store->get("key"), "second");
  EXPECT_EQ(*user()->get("key"), "second");
}

// spec: C7.bytes values are bytes, any byte
// spec: C15 set, compare_set and append take text or bytes; get returns the bytes
TEST_P(StoreSuite, KeepsAnyByte) {
  const auto store = user();
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), 0);
  ASSERT_OK(store->set(all, all));
  ASSERT_OK(store->set("empty", ""));
  EXPECT_EQ(*user()->get(all), all);
  EXPECT_EQ(*store->get("empty"), "");
  EXPECT_EQ(*store->compare_set(all, all, std::string("\0\n", 2)), std::string("\0\n", 2));
  ASSERT_OK(store->append(all, all));
  EXPECT_EQ(*store->get(all), std::string("\0\n", 2) + all);
}

// spec: C7 any length: random sizes around every buffer's edge
TEST_P(StoreSuite, KeepsAnyLength) {
  const auto store = user(), other = user();
  std::mt19937_64 random(7);
  for (const std::size_t size :
       {1u, 15u, 16u, 17u, 4095u, 4096u, 65535u, 65536u, 65537u, 262144u, 1000003u}) {
    std::string value(size, '\0');
    std::generate(value.begin(), value.end(), [&] { return static_cast<char>(random()); });
    ASSERT_OK(store->set("key", value));
    ASSERT_EQ(*other->get("key"), value) << size;
  }
}

// spec: C7 a value of 64 MiB
TEST_P(StoreSuite, Keeps64MiB) {
  const auto store = user(), other = user();
  // etcd's JSON takes a client that is sanitized a second for each MiB.
  const std::size_t mib = muster::testing::kSanitized && kind() == "etcd" ? 8 : 64;
  std::string value(mib << 20, 'x');
  for (std::size_t i = 0; i < value.size(); i += 4093) value[i] = static_cast<char>(i);
  ASSERT_OK(store->set("large", value));
  const auto back = other->get("large");
  ASSERT_OK(back);
  EXPECT_TRUE(*back == value);
}

// spec: C7.limit the stated limit: a longer key or value is refused in words and harms nothing
TEST_P(StoreSuite, StatesItsLimits) {
  const auto store = user();
  const Status status = store->set(std::string(kMaxKeyBytes + 1, 'k'), "value");
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find(std::to_string(kMaxKeyBytes)), std::string::npos)
      << status.message();
  const std::string longest(
      kMaxKeyBytes - (kind() == "prefix" ? std::string("outer/inner/").size() : 0), 'k');
  ASSERT_OK(store->set(longest, "value"));
  EXPECT_EQ(*store->get(longest), "value");
}

// spec: C7.blocks get blocks until the key is set
TEST_P(StoreSuite, GetBlocksUntilSet) {
  const auto store = user(), other = user();
  auto got = std::async(std::launch::async, [&] { return store->get("later"); });
  ASSERT_OK(other->set("later", "value"));
  EXPECT_EQ(*got.get(), "value");
}

// A get that blocks must not hold up the same store's other callers.
// spec: C7 get blocks only its own caller
TEST_P(StoreSuite, OneObjectServesManyThreads) {
  const auto store = user();
  std::vector<std::future<Result<std::string>>> waiting;
  for (int i = 0; i < 8; ++i)
    waiting.push_back(
        std::async(std::launch::async, [&, i] { return store->get("key" + std::to_string(i)); }));
  for (int i = 0; i < 8; ++i) ASSERT_OK(store->set("key" + std::to_string(i), std::to_string(i)));
  for (int i = 0; i < 8; ++i)
    EXPECT_EQ(*waiting[static_cast<std::size_t>(i)].get(), std::to_string(i));
}

// spec: C7.timeout timeout: the error names the key and the time waited
TEST_P(StoreSuite, GetTimesOutNamingKeyAndTime) {
  const auto store = user();
  const auto got = store->get("nobody sets this", milliseconds(60));
  EXPECT_EQ(got.status().code(), Code::timed_out);
  EXPECT_NE(got.status().message().find("nobody sets this"), std::string::npos)
      << got.status().message();
  EXPECT_NE(got.status().message().find(" ms"), std::string::npos) << got.status().message();
  ASSERT_OK(store->set("nobody sets this", "still alive"));
  EXPECT_EQ(*store->get("nobody sets this"), "still alive");
}

// spec: C13 set_timeout rules get and wait where no timeout is given
TEST_P(StoreSuite, SetTimeoutRules) {
  const auto store = user();
  EXPECT_EQ(store->timeout(), kLong);
  store->set_timeout(kShort);
  EXPECT_EQ(store->timeout(), kShort);
  EXPECT_EQ(store->get("missing").status().code(), Code::timed_out);
  EXPECT_EQ(store->wait(Strings{"missing"}).code(), Code::timed_out);
  EXPECT_EQ(store->multi_get(Strings{"missing"}).status().code(), Code::timed_out);
  EXPECT_EQ(store->queue_pop("missing").status().code(), Code::timed_out);
}

// spec: C8.add add creates, adds, returns the sum, and get gives it as decimal text
TEST_P(StoreSuite, AddCounts) {
  const auto store = user();
  EXPECT_EQ(*store->add("count", 1), 1);
  EXPECT_EQ(*store->add("count", 6), 7);
  EXPECT_EQ(*store->get("count"), "7");
  EXPECT_EQ(*store->add("count", -10), -3);
  EXPECT_EQ(*store->get("count"), "-3");
  ASSERT_OK(store->set("set", "41"));
  EXPECT_EQ(*store->add("set", 1), 42);
}

// spec: C8.text add on a key that holds no number is an error
TEST_P(StoreSuite, AddOnTextFails) {
  const auto store = user();
  for (const char* text : {"text", "", "1.5", " 1", "1 ", "0x10"}) {
    ASSERT_OK(store->set("key", text));
    const auto sum = store->add("key", 1);
    EXPECT_EQ(sum.status().code(), Code::store) << text;
    EXPECT_NE(sum.status().message().find("key"), std::string::npos);
    EXPECT_EQ(*store->get("key"), text);
  }
  ASSERT_OK(store->set("key", std::to_string(std::numeric_limits<std::int64_t>::max())));
  EXPECT_EQ(store->add("key", 1).status().code(), Code::store);
}

// spec: C4 HashStore: threads of one process, thread-safe
// spec: C8.atomic add is atomic among all users
TEST_P(StoreSuite, AddIsAtomic) {
  constexpr int kThreads = 6, kEach = 100;
  std::vector<std::future<std::vector<std::int64_t>>> users;
  for (int t = 0; t < kThreads; ++t) {
    users.push_back(std::async(std::launch::async, [store = user()] {
      std::vector<std::int64_t> seen;
      for (int i = 0; i < kEach; ++i) seen.push_back(*store->add("count", 1));
      return seen;
    }));
  }
  std::vector<std::int64_t> all;
  for (auto& each : users) {
    for (const std::int64_t value : each.get()) all.push_back(value);
  }
  std::sort(all.begin(), all.end());
  for (int i = 0; i < kThreads * kEach; ++i) ASSERT_EQ(all[static_cast<std::size_t>(i)], i + 1);
}

// spec: C9 compare_set: equal, different, missing with an empty and with another expectation
TEST_P(StoreSuite, CompareSet) {
  const auto store = user();
  EXPECT_EQ(*store->compare_set("key", "something", "new"), "something");
  EXPECT_FALSE(*store->check(Strings{"key"}));
  EXPECT_EQ(*store->compare_set("key", "", "first"), "first");
  EXPECT_EQ(*store->get("key"), "first");
  EXPECT_EQ(*store->compare_set("key", "other", "second"), "first");
  EXPECT_EQ(*store->compare_set("key", "", "second"), "first");
  EXPECT_EQ(*store->compare_set("key", "first", "second"), "second");
  EXPECT_EQ(*store->get("key"), "second");
}

// spec: C9 compare_set races: of all who want the same change exactly one makes it
TEST_P(StoreSuite, CompareSetRaces) {
  constexpr int kThreads = 6, kRounds = 40;
  const auto judge = user();
  std::vector<std::future<int>> users;
  for (int t = 0; t < kThreads; ++t) {
    users.push_back(std::async(std::launch::async, [t, store = user()] {
      int won = 0;
      for (int round = 0; round < kRounds; ++round) {
        const std::string before = round == 0 ? "" : "round " + std::to_string(round - 1);
        const std::string claim = "claim " + std::to_string(round) + " by " + std::to_string(t);
        const std::string winner = *store->compare_set("slot", before, claim);
        if (winner == claim) {
          ++won;
          EXPECT_EQ(*store->compare_set("slot", claim, "round " + std::to_string(round)),
                    "round " + std::to_string(round));
        }
        EXPECT_TRUE(store->barrier("round", kThreads).ok());
      }
      return won;
    }));
  }
  int won = 0;
  for (auto& each : users) won += each.get();
  EXPECT_EQ(won, kRounds);
  EXPECT_EQ(*judge->get("slot"), "round " + std::to_string(kRounds - 1));
}

// spec: C10.wait wait returns once all keys are there
TEST_P(StoreSuite, WaitForAll) {
  const auto store = user(), other = user();
  auto waited = std::async(std::launch::async, [&] {
    return store->wait(Strings{"a", "b", "c", "a"});
  });
  for (const char* key : {"c", "a", "b"}) ASSERT_OK(other->set(key, ""));
  ASSERT_OK(waited.get());
  ASSERT_OK(store->wait(Strings{}, kShort));
}

// spec: C10.timeout wait throws at the timeout, naming the keys still missing
TEST_P(StoreSuite, WaitNamesMissingKeys) {
  const auto store = user();
  ASSERT_OK(store->set("present", ""));
  const Status status = store->wait(Strings{"absent one", "present", "absent two"}, kShort);
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_NE(status.message().find("absent one\""), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("absent two\""), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find("present\""), std::string::npos) << status.message();
}

// spec: C7 concurrent waiters: one set frees all who wait for the key
// spec: C10 concurrent waiters
TEST_P(StoreSuite, OneSetFreesAllWaiters) {
  constexpr int kWaiters = 8;
  std::vector<std::future<bool>> waiting;
  for (int i = 0; i < kWaiters; ++i) {
    waiting.push_back(std::async(std::launch::async, [i, store = user()] {
      EXPECT_TRUE(store->add("waiting", 1).ok());
      return i % 2 == 0 ? store->wait(Strings{"go", "also"}).ok() : *store->get("go") == "now";
    }));
  }
  const auto store = user();
  ASSERT_OK(store->set("also", ""));
  ASSERT_OK(store->set("go", "now"));
  for (auto& each : waiting) EXPECT_TRUE(each.get());
}

// spec: C11 num_keys counts the keys, with TCPStore one more
// spec: C16 after one set: hash 1, file 1, prefix 1, etcd 1, tcp 2
TEST_P(StoreSuite, NumKeys) {
  const auto store = user();
  const int more = is_tcp() ? 1 : 0;
  EXPECT_EQ(*store->num_keys(), 0 + more);
  ASSERT_OK(store->set("first", "1"));
  EXPECT_EQ(*store->num_keys(), 1 + more);
  ASSERT_OK(store->set("first", "2"));
  EXPECT_EQ(*store->num_keys(), 1 + more);
  EXPECT_EQ(*user()->num_keys(), 1 + more);
  ASSERT_OK(store->add("second", 1));
  EXPECT_EQ(*store->num_keys(), 2 + more);
}

// spec: C12 delete_key says whether there was one; on a FileStore it is an error
TEST_P(StoreSuite, DeleteKey) {
  const auto store = user();
  ASSERT_OK(store->set("key", "value"));
  const auto deleted = store->delete_key("key");
  if (kind() == "file") {
    EXPECT_EQ(deleted.status().code(), Code::unsupported);
    EXPECT_NE(deleted.status().message().find("delete_key"), std::string::npos)
        << deleted.status().message();
    EXPECT_EQ(*store->get("key"), "value");
    return;
  }
  EXPECT_TRUE(*deleted);
  EXPECT_FALSE(*store->delete_key("key"));
  EXPECT_FALSE(*store->check(Strings{"key"}));
  EXPECT_EQ(store->get("key", kShort).status().code(), Code::timed_out);
}

// spec: C14.keys check, append, multi_set, multi_get, list_keys
TEST_P(StoreSuite, ChecksAppendsAndLists) {
  const auto store = user();
  EXPECT_FALSE(*store->check(Strings{"a"}));
  EXPECT_TRUE(*store->check(Strings{}));
  ASSERT_OK(store->append("a", "one"));
  ASSERT_OK(store->append("a", ", two"));
  EXPECT_EQ(*store->get("a"), "one, two");
  ASSERT_OK(store->multi_set(Strings{"b", "c"}, Strings{"2", "3"}));
  EXPECT_TRUE(*store->check(Strings{"a", "b", "c"}));
  EXPECT_FALSE(*store->check(Strings{"a", "d"}));
  EXPECT_EQ(*store->multi_get(Strings{"c", "a", "c"}), (Strings{"3", "one, two", "3"}));
  EXPECT_EQ(*store->multi_get(Strings{}), Strings{});
  Strings keys = *store->list_keys();
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys, (Strings{"a", "b", "c"}));
  EXPECT_EQ(store->multi_set(Strings{"b"}, Strings{}).code(), Code::invalid_argument);
}

// spec: C14 multi_get blocks until the last key is there
TEST_P(StoreSuite, MultiGetBlocks) {
  const auto store = user(), other = user();
  auto got = std::async(std::launch::async, [&] { return store->multi_get(Strings{"a", "b"}); });
  ASSERT_OK(other->set("b", "2"));
  ASSERT_OK(other->set("a", "1"));
  EXPECT_EQ(*got.get(), (Strings{"1", "2"}));
}

// spec: C14.clone clone: the same data, a timeout of its own
TEST_P(StoreSuite, Clone) {
  const auto store = user();
  const auto copy = *store->clone();
  ASSERT_OK(copy->set("key", "value"));
  EXPECT_EQ(*store->get("key"), "value");
  EXPECT_EQ(copy->kind(), kind_in_words());
  EXPECT_EQ(copy->timeout(), store->timeout());
  if (kind() != "prefix") {
    copy->set_timeout(kShort);
    EXPECT_EQ(store->timeout(), kLong);
  }
}

// spec: C14 ten thousand keys
TEST_P(StoreSuite, TenThousandKeys) {
  constexpr int kKeys = 10000;
  const auto store = user(), other = user();
  Strings keys, values;
  for (int i = 0; i < kKeys; ++i) {
    keys.push_back("key " + std::to_string(i));
    values.push_back("value " + std::to_string(i * 7));
  }
  auto all = std::async(std::launch::async, [&] { return other->multi_get(keys); });
  for (std::size_t i = 0; i < keys.size() / 2; ++i) ASSERT_OK(store->set(keys[i], values[i]));
  ASSERT_OK(store->multi_set(std::span(keys).subspan(keys.size() / 2),
                             std::span(values).subspan(keys.size() / 2)));
  const auto found = all.get();
  ASSERT_OK(found);
  EXPECT_EQ(*found, values);
  const auto count = store->num_keys();
  ASSERT_OK(count);
  EXPECT_EQ(*count, kKeys + (is_tcp() ? 1 : 0));
  const auto listed = store->list_keys();
  ASSERT_OK(listed);
  EXPECT_EQ(listed->size(), static_cast<std::size_t>(kKeys));
  ASSERT_OK(store->wait(keys));
}

}  // namespace
}  // namespace muster::store::testing
