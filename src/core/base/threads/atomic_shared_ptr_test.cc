#include "core/base/threads/atomic_shared_ptr.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace muster {
namespace {

/// Knows how many of it there are, and whether it is still there.
struct Counted {
  explicit Counted(std::atomic<int>& all) : count(all) { ++count; }
  ~Counted() {
    alive = false;
    --count;
  }
  std::atomic<int>& count;
  bool alive = true;
};
using Slot = AtomicSharedPtr<Counted>;

TEST(AtomicSharedPtr, HoldsWhatStandsThereUntilTheLastLetsGo) {
  std::atomic<int> count{0};
  Slot slot;
  EXPECT_EQ(Slot::SharedHold(slot).get(), nullptr);
  slot.set(std::make_shared<Counted>(count));
  {
    const Slot::SharedHold first(slot), second(slot);
    EXPECT_EQ(first.get(), second.get());
    slot.set(std::make_shared<Counted>(count));
    const Slot::SharedHold third(slot);
    EXPECT_NE(third.get(), first.get());
    EXPECT_EQ(count, 2);
    slot.set(nullptr);
    EXPECT_EQ(Slot::SharedHold(slot).get(), nullptr);
    EXPECT_EQ(count, 2);
    EXPECT_TRUE(first.get()->alive && third.get()->alive);
  }
  EXPECT_EQ(count, 0);
}

TEST(AtomicSharedPtr, LeavesOneThatOthersOwnTooToThem) {
  std::atomic<int> count{0};
  auto owned = std::make_shared<Counted>(count);
  Slot slot;
  slot.set(owned);
  slot.set(nullptr);
  EXPECT_EQ(owned.use_count(), 1);
  slot.set(owned);
  owned.reset();
  EXPECT_EQ(count, 1);
}

// The first thread that holds only writes it down; another one changes the place.
TEST(AtomicSharedPtr, KeepsWhatTheOwnerHoldsWhileAnotherChangesThePlace) {
  std::atomic<int> count{0};
  Slot slot;
  slot.set(std::make_shared<Counted>(count));
  for (int round = 0; round < 100; ++round) {
    const auto* const before = Slot::SharedHold(slot).get();
    {
      const Slot::SharedHold held(slot);
      ASSERT_EQ(held.get(), before);
      std::thread([&] {
        slot.set(std::make_shared<Counted>(count));
        EXPECT_EQ(count, 2);
        slot.set(std::make_shared<Counted>(count));
        EXPECT_EQ(count, 2);  // the one that nobody holds has gone
      }).join();
      ASSERT_TRUE(held.get()->alive);
      const Slot::SharedHold another(slot);
      ASSERT_NE(another.get(), held.get());
    }
    ASSERT_EQ(count, 1);
  }
  slot.set(nullptr);
  EXPECT_EQ(count, 0);
}

// The place changes all the time while one thread holds what it finds there for a moment: at
// whichever moment that is seen, what moves out goes, and goes once.
TEST(AtomicSharedPtr, LosesNothingOfWhatOneThreadHoldsForAMoment) {
  constexpr int kRounds = 20'000;
  std::atomic<int> count{0};
  std::atomic<bool> over{false};
  Slot slot;
  std::thread changing;
  {
    const Slot::SharedHold first(slot);  // this thread is the owner
    changing = std::thread([&] {
      for (int round = 0; round < kRounds; ++round) slot.set(std::make_shared<Counted>(count));
      over = true;
    });
  }
  bool wrong = false;
  while (!over) {
    const Slot::SharedHold held(slot);
    wrong = wrong || (held.get() != nullptr && !held.get()->alive);
  }
  changing.join();
  EXPECT_FALSE(wrong);
  EXPECT_EQ(count, 1);
  slot.set(nullptr);
  EXPECT_EQ(count, 0);
}

TEST(AtomicSharedPtr, ThreadsNeverSeeWhatIsGone) {
  constexpr int kThreads = 4, kRounds = 5000;
  std::atomic<int> count{0};
  std::atomic<bool> wrong{false}, over{false};
  Slot slot;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      while (!over) {
        const Slot::SharedHold one(slot), two(slot);
        if ((one.get() != nullptr && !one.get()->alive) ||
            (two.get() != nullptr && !two.get()->alive))
          wrong = true;
      }
    });
  }
  for (int round = 0; round < kRounds; ++round)
    slot.set(round % 7 == 0 ? nullptr : std::make_shared<Counted>(count));
  over = true;
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  slot.set(nullptr);
  EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace muster
