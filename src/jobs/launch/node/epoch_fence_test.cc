// SPDX-License-Identifier: BSD-3-Clause
// Telling the workers' store of epochs: a store that answers, fails, loses its answer, or hangs.

#include "jobs/launch/node/epoch_fence.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "core/base/process/interruption.h"
#include "core/rendezvous/rendezvous.h"
#include "core/store/factory.h"
#include "jobs/membership/factory.h"
#include "testing/limits.h"

namespace muster::launch {
namespace {

/// The record of epochs in a store that the test makes fail and hang.
class FencedStore {
 public:
  /// The fate of a commit.
  enum class Answer : std::uint8_t { given, lost, refused, hangs };

  Result<std::int64_t> commit(const membership::Epoch& epoch, std::int64_t expected) {
    std::unique_lock lock(mutex);
    ++commits;
    changed.notify_all();
    while (answer == Answer::hangs) {
      changed.wait_for(lock, Interruption::look_every());
      if (Status stopped = Interruption::of_thread(); !stopped) return stopped;
    }
    if (answer == Answer::refused) return Status(Code::timed_out, "no answer");
    if (expected != revision)
      return Status(Code::refused, "revision " + std::to_string(revision) + " is there");
    present = epoch;
    ++revision;
    if (answer == Answer::lost) return Status(Code::timed_out, "the answer was lost");
    return revision;
  }
  void will(Answer next) {
    const std::lock_guard lock(mutex);
    answer = next;
    changed.notify_all();
  }
  void until_asked(int times) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(
        changed.wait_for(lock, muster::testing::kMustHappen, [&] { return commits >= times; }));
  }
  int asked() {
    const std::lock_guard lock(mutex);
    return commits;
  }
  std::int64_t number() {
    const std::lock_guard lock(mutex);
    return present.number;
  }

  std::mutex mutex;
  std::condition_variable changed;
  Answer answer = Answer::given;
  int commits = 0;
  membership::Epoch present;
  std::int64_t revision = 0;
};

class FencedWatch final : public membership::Watch {
 public:
  explicit FencedWatch(FencedStore& store) : store_(store) {}
  Result<membership::Update> next(Duration) override {
    const std::lock_guard lock(store_.mutex);
    membership::Update update;
    update.snapshot = true;
    if (store_.present.number > 0) update.epoch = store_.present;
    update.epoch_revision = update.revision = store_.revision;
    return update;
  }
  void close() override {}

 private:
  FencedStore& store_;
};

class FencedMembership final : public membership::Membership {
 public:
  explicit FencedMembership(FencedStore& store) : store_(store) {}
  Result<std::unique_ptr<membership::Hold>> hold(std::string_view, std::string_view,
                                                 Duration) override {
    return Status(Code::internal, "no node takes a place here");
  }
  Result<std::unique_ptr<membership::Watch>> watch(std::string_view) override {
    return std::unique_ptr<membership::Watch>(std::make_unique<FencedWatch>(store_));
  }
  Result<std::int64_t> commit(const membership::Epoch& epoch, std::int64_t expected) override {
    return store_.commit(epoch, expected);
  }
  const char* kind() const override { return "a test"; }

 private:
  FencedStore& store_;
};

class Fence : public ::testing::Test {
 protected:
  void SetUp() override {
    auto started = EpochFence::start(std::make_unique<FencedMembership>(store));
    ASSERT_TRUE(started.ok()) << started.status().message();
    fence = std::move(*started);
  }
  void raise(std::int64_t number) {
    membership::Epoch epoch;
    epoch.number = number;
    fence->raise(epoch);
  }
  EpochFence::Raised raised() {
    pollfd ready{fence->descriptor(), POLLIN, 0};
    EXPECT_EQ(::poll(&ready, 1, muster::testing::kMustHappenMs), 1);
    return fence->take();
  }

  FencedStore store;
  std::unique_ptr<EpochFence> fence;
};

// spec: L5 the store of the workers is told of each epoch, and says so
TEST_F(Fence, TellsTheStoreOfEachEpoch) {
  for (const std::int64_t number : {1, 2, 7}) {
    raise(number);
    const EpochFence::Raised result = raised();
    EXPECT_EQ(result.epoch, number);
    EXPECT_TRUE(result.status.ok()) << result.status.message();
    EXPECT_EQ(store.number(), number);
  }
  EXPECT_EQ(store.asked(), 3);
}

// spec: L5 the answer to an epoch was lost: the store has it, and takes the next one
TEST_F(Fence, ALostAnswerIsNoFailure) {
  store.will(FencedStore::Answer::lost);
  raise(1);
  EXPECT_TRUE(raised().status.ok());
  EXPECT_EQ(store.asked(), 1);
  store.will(FencedStore::Answer::given);
  raise(2);
  EXPECT_TRUE(raised().status.ok());
  EXPECT_EQ(store.asked(), 2) << "the revision that the lost answer had is known";
}

// spec: L5 a store that does not take an epoch holds no launcher up, and is told again until it
// does
TEST_F(Fence, AFailureIsToldOnceAndTheEpochAgain) {
  store.will(FencedStore::Answer::refused);
  raise(1);
  const EpochFence::Raised failed = raised();
  EXPECT_EQ(failed.epoch, 1);
  EXPECT_EQ(failed.status.code(), Code::timed_out);
  store.until_asked(store.asked() + 2);
  EXPECT_EQ(fence->take().epoch, 0) << "told twice";
  store.will(FencedStore::Answer::given);
  const TimePoint limit = steady_clock().now() + muster::testing::kMustHappen;
  while (store.number() != 1 && steady_clock().now() < limit) std::this_thread::yield();
  EXPECT_EQ(store.number(), 1);
}

// spec: L5 an epoch that is overtaken while the store hangs is told to no store
TEST_F(Fence, OnlyTheLastEpochCounts) {
  store.will(FencedStore::Answer::hangs);
  raise(1);
  store.until_asked(1);
  raise(2);
  raise(3);
  store.will(FencedStore::Answer::given);
  const EpochFence::Raised result = raised();
  EXPECT_EQ(result.epoch, 3);
  EXPECT_TRUE(result.status.ok()) << result.status.message();
  EXPECT_EQ(store.number(), 3);
}

// spec: L5 a launcher that ends waits for no store that hangs
TEST_F(Fence, AStoreThatHangsHoldsNoEndUp) {
  store.will(FencedStore::Answer::hangs);
  raise(1);
  store.until_asked(1);
  fence.reset();
  EXPECT_EQ(store.number(), 0);
}

// spec: L5 with a real store: workers of the epoch before are refused once the fence is raised
TEST(EpochFenceOfAStore, RefusesWorkersOfTheEpochBefore) {
  store::TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = 0;
  options.is_server = true;
  options.secret = Secret::random();
  const auto served = store::make_tcp_store(options);
  ASSERT_TRUE(served.ok()) << served.status().message();
  auto lying_there = membership::make_agent_membership(*served, "job", muster::testing::kMustHappen,
                                                       muster::testing::kMustHappen);
  ASSERT_TRUE(lying_there.ok());
  auto fence = EpochFence::start(std::move(*lying_there));
  ASSERT_TRUE(fence.ok());
  const auto raise = [&](std::int64_t number) {
    membership::Epoch epoch;
    epoch.number = number;
    (*fence)->raise(epoch);
    pollfd ready{(*fence)->descriptor(), POLLIN, 0};
    EXPECT_EQ(::poll(&ready, 1, muster::testing::kMustHappenMs), 1);
    const EpochFence::Raised result = (*fence)->take();
    EXPECT_EQ(result.epoch, number);
    EXPECT_TRUE(result.status.ok()) << result.status.message();
  };
  raise(1);
  store::TcpStoreOptions worker = options;
  worker.is_server = false;
  worker.port = (*served)->port();
  worker.epoch = 1;
  worker.epoch_record = store::epoch_record("job");
  const auto before = store::make_tcp_store(worker);
  ASSERT_TRUE(before.ok()) << before.status().message();
  EXPECT_TRUE((*before)->set("key", "value").ok());
  raise(2);
  EXPECT_FALSE((*before)->set("key", "late").ok());
  EXPECT_EQ((*served)->get("key").value(), "value");
}

}  // namespace
}  // namespace muster::launch
