// SPDX-License-Identifier: BSD-3-Clause
// Queues, barriers and all_gathers of every kind of store; the rest of the suite, and its kinds,
// are in store_suite_test.cc.

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "core/store/testing/store_kinds.h"
#include "testing/budget.h"

namespace muster::store::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// spec: C14.queues queues: first in, first out; a pop that blocks; an empty queue without blocking
TEST_P(StoreSuite, Queues) {
  const auto store = user(), other = user();
  EXPECT_EQ(*store->queue_len("queue"), 0);
  EXPECT_EQ(store->queue_pop("queue", false).status().code(), Code::store);
  for (int i = 0; i < 5; ++i) ASSERT_OK(store->queue_push("queue", std::to_string(i)));
  EXPECT_EQ(*other->queue_len("queue"), 5);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(*other->queue_pop("queue"), std::to_string(i));
  auto popped = std::async(std::launch::async, [&] { return store->queue_pop("queue"); });
  ASSERT_OK(other->queue_push("queue", "late"));
  EXPECT_EQ(*popped.get(), "late");
  const auto none = store->queue_pop("queue", true, kShort);
  EXPECT_EQ(none.status().code(), Code::timed_out);
  EXPECT_NE(none.status().message().find("queue"), std::string::npos);
  EXPECT_EQ(*store->queue_len("queue"), 0);
}

// spec: C14 queues: every value reaches exactly one of many who pop
TEST_P(StoreSuite, QueueValuesReachOneEach) {
  constexpr int kThreads = 4, kEach = 25;
  std::vector<std::future<Strings>> consumers;
  for (int t = 0; t < kThreads; ++t) {
    consumers.push_back(std::async(std::launch::async, [store = user()] {
      Strings seen;
      for (int i = 0; i < kEach; ++i) seen.push_back(*store->queue_pop("queue"));
      return seen;
    }));
  }
  const auto store = user();
  for (int i = 0; i < kThreads * kEach; ++i)
    ASSERT_OK(store->queue_push("queue", std::to_string(1000 + i)));
  Strings all;
  for (auto& each : consumers) {
    const Strings seen = each.get();
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    all.insert(all.end(), seen.begin(), seen.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  EXPECT_EQ(all.size(), static_cast<std::size_t>(kThreads * kEach));
}

// spec: C14.barrier native barrier: nobody leaves before the last has come, again and again under
// one key
TEST_P(StoreSuite, Barrier) {
  constexpr int kMembers = 5, kRounds = 20;
  std::atomic<int> arrived = 0;
  std::vector<std::future<void>> members;
  for (int m = 0; m < kMembers; ++m) {
    members.push_back(std::async(std::launch::async, [&, store = user()] {
      for (int round = 0; round < kRounds; ++round) {
        ++arrived;
        const Status status = store->barrier("barrier", kMembers);
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_GE(arrived.load(), (round + 1) * kMembers);
      }
    }));
  }
  for (auto& each : members) each.get();
}

// spec: C14 barrier: at the timeout says how many came, and starts afresh afterwards
TEST_P(StoreSuite, BarrierTimesOut) {
  const auto store = user(), other = user();
  const Status status = store->barrier("lonely", 3, kShort);
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_NE(status.message().find("1 of 3"), std::string::npos) << status.message();
  auto second = std::async(std::launch::async, [&] { return other->barrier("lonely", 2); });
  ASSERT_OK(store->barrier("lonely", 2));
  ASSERT_OK(second.get());
}

// spec: C14.all_gather native all_gather: everybody's value in order of the index, again and again
// under one key
TEST_P(StoreSuite, AllGather) {
  constexpr int kMembers = 5, kRounds = 20;
  std::vector<std::future<void>> members;
  for (int m = 0; m < kMembers; ++m) {
    members.push_back(std::async(std::launch::async, [&, m, store = user()] {
      for (int round = 0; round < kRounds; ++round) {
        const auto value = [&](int member) {
          return std::to_string(round) + std::string("\0:", 2) + std::to_string(member);
        };
        const auto all = store->all_gather("gather", m, kMembers, value(m));
        ASSERT_TRUE(all.ok()) << all.status().message();
        ASSERT_EQ(all->size(), static_cast<std::size_t>(kMembers));
        for (int other = 0; other < kMembers; ++other)
          EXPECT_EQ((*all)[static_cast<std::size_t>(other)], value(other));
      }
    }));
  }
  for (auto& each : members) each.get();
}

// spec: C14 all_gather: at the timeout names the missing, the same to all who waited; who comes too
// late learns it at once
TEST_P(StoreSuite, AllGatherNamesTheMissing) {
  const auto first = user(), second = user(), late = user();
  Status mine, theirs;
  std::string key;
  // The first waits shortly, the second long: where the second was there in time, its wait must end
  // with the first one's.
  for (int attempt = 0; attempt < 20 && (theirs.ok() || mine.ranks().size() != 2); ++attempt) {
    key = "gather" + std::to_string(attempt);
    auto other = std::async(std::launch::async, [&] {
      EXPECT_TRUE(second->set("ready" + key, "").ok());
      return second->all_gather(key, 3, 4, "d", seconds(2)).status();
    });
    ASSERT_OK(first->get("ready" + key));
    mine = first->all_gather(key, 1, 4, "b", milliseconds(100)).status();
    theirs = other.get();
  }
  for (const Status& status : {mine, theirs}) {
    EXPECT_EQ(status.code(), Code::timed_out) << status.message();
    EXPECT_EQ(status.ranks(), (std::vector<int>{0, 2})) << status.message();
    EXPECT_NE(status.message().find("0 and 2"), std::string::npos) << status.message();
  }
  const Status told = late->all_gather(key, 2, 4, "c", kLong).status();
  EXPECT_EQ(told.code(), Code::peer_failed);
  EXPECT_EQ(told.ranks(), (std::vector<int>{1, 3})) << "they gave up";
  EXPECT_NE(told.message().find("too late: ranks 1 and 3 gave up waiting for ranks 0 and 2"),
            std::string::npos)
      << told.message();
}

// spec: C14 barrier, all_gather: impossible numbers are refused
TEST_P(StoreSuite, MeetingsRefuseImpossibleNumbers) {
  const auto store = user();
  EXPECT_EQ(store->all_gather("gather", 2, 2, "x").status().code(), Code::invalid_argument);
  EXPECT_EQ(store->all_gather("gather", -1, 2, "x").status().code(), Code::invalid_argument);
  EXPECT_EQ(store->barrier("barrier", 0).code(), Code::invalid_argument);
  EXPECT_EQ(store->barrier("barrier", 1).code(), Code::ok);
}

}  // namespace
}  // namespace muster::store::testing
