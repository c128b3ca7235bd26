#include "muster/base/task.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

Task<int> immediately(int value) { co_return value; }

Task<int> when(const bool& condition, int value) {
  co_await until([&] { return condition; });
  co_return value;
}

Task<> fails() { co_return Status(Code::mismatch, "no"); }

TEST(Task, RunsOnlyWhenStepped) {
  bool ran = false;
  auto make = [&ran]() -> Task<> {
    ran = true;
    co_return Status();
  };
  Task<> task = make();
  EXPECT_FALSE(ran);
  EXPECT_TRUE(task.step());
  EXPECT_TRUE(ran);
  EXPECT_TRUE(task.done());
  EXPECT_TRUE(task.result().ok());
}

TEST(Task, CountsHowOftenItWentOn) {
  bool go = false;
  const auto twice = [](const bool& condition) -> Task<int> {
    co_await until([&] { return condition; });
    co_await until([asked = 0]() mutable { return asked++ > 0; });
    co_return 1;
  };
  Task<int> task = twice(go);
  EXPECT_EQ(task.turns(), 0u);
  EXPECT_FALSE(task.step());
  const std::size_t begun = task.turns();
  EXPECT_FALSE(task.step());
  EXPECT_EQ(task.turns(), begun) << "it found nothing to do";
  go = true;
  EXPECT_FALSE(task.step());
  EXPECT_EQ(task.turns(), begun + 1);
  EXPECT_TRUE(task.step());
  EXPECT_EQ(task.turns(), begun + 2);
}

TEST(Task, WaitsForItsPredicate) {
  bool go = false;
  Task<int> task = when(go, 5);
  EXPECT_FALSE(task.step());
  EXPECT_FALSE(task.step());
  go = true;
  EXPECT_TRUE(task.step());
  EXPECT_EQ(task.result(), 5);
}

Task<int> sum(const bool& first, const bool& second) {
  const int a = co_await when(first, 1);
  const int b = co_await immediately(10);
  const int c = co_await when(second, 100);
  co_return a + b + c;
}

TEST(Task, ChildrenGoOnWhereTheyWaited) {
  bool first = false, second = false;
  Task<int> task = sum(first, second);
  EXPECT_FALSE(task.step());
  first = true;
  EXPECT_FALSE(task.step());
  EXPECT_FALSE(task.step());
  second = true;
  EXPECT_TRUE(task.step());
  EXPECT_EQ(task.result(), 111);
}

Task<> passes_on() {
  const Status status = co_await fails();
  co_return status.with_context("outer");
}

TEST(Task, FailuresAreValues) {
  Task<> task = passes_on();
  EXPECT_TRUE(task.step());
  EXPECT_EQ(task.result().message(), "outer: no");
}

// A step must cost the innermost predicate only, however deep the chain is.
Task<int> deep(int levels, int& asked) {
  if (levels > 0) co_return co_await deep(levels - 1, asked) + 1;
  co_await until([&] { return ++asked == 50; });
  co_return 0;
}

TEST(Task, AStepAsksTheInnermostPredicateOnce) {
  int asked = 0;
  Task<int> task = deep(100, asked);
  int steps = 1;
  while (!task.step()) ++steps;
  EXPECT_EQ(steps, 50);
  EXPECT_EQ(task.result(), 100);
}

Task<int> holds(std::shared_ptr<int> held, const bool& go) {
  auto inner = [](std::shared_ptr<int> more, const bool& signal) -> Task<int> {
    co_await until([&] { return signal; });
    co_return *more;
  };
  co_return co_await inner(held, go);
}

TEST(Task, DestroyingAnUnfinishedTaskFreesTheWholeChain) {
  const auto held = std::make_shared<int>(1);
  const bool never = false;
  {
    Task<int> task = holds(held, never);
    EXPECT_FALSE(task.step());
    EXPECT_GT(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
  {
    const Task<int> never_stepped = holds(held, never);
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Task, MovesKeepTheirPlace) {
  bool go = false;
  Task<int> task = when(go, 3);
  EXPECT_FALSE(task.step());
  Task<int> moved = std::move(task);
  EXPECT_FALSE(task.valid());
  go = true;
  EXPECT_TRUE(moved.step());
  Task<int> assigned;
  assigned = std::move(moved);
  EXPECT_EQ(assigned.result(), 3);
}

TEST(Task, MayBeSteppedAndFreedByAnotherThread) {
  bool go = false;
  for (int round = 0; round < 100; ++round) {
    go = false;
    auto task = std::make_unique<Task<int>>(when(go, round));
    EXPECT_FALSE(task->step());
    std::thread([&, mine = std::move(task)]() mutable {
      go = true;
      EXPECT_TRUE(mine->step());
      EXPECT_EQ(mine->result(), round);
      mine.reset();
    }).join();
  }
}

}  // namespace
}  // namespace muster
