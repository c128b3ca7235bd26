// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/time/task.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

Task<Result<int>> immediately(int value) { co_return value; }

Task<Result<int>> when(const bool& condition, int value) {
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
  const auto twice = [](const bool& condition) -> Task<Result<int>> {
    co_await until([&] { return condition; });
    co_await until([asked = 0]() mutable { return asked++ > 0; });
    co_return 1;
  };
  Task<Result<int>> task = twice(go);
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
  Task<Result<int>> task = when(go, 5);
  EXPECT_FALSE(task.step());
  EXPECT_FALSE(task.step());
  go = true;
  EXPECT_TRUE(task.step());
  EXPECT_EQ(*task.result(), 5);
}

Task<Result<int>> sum(const bool& first, const bool& second) {
  const int a = *co_await when(first, 1);
  const int b = *co_await immediately(10);
  const int c = *co_await when(second, 100);
  co_return a + b + c;
}

TEST(Task, ChildrenGoOnWhereTheyWaited) {
  bool first = false, second = false;
  Task<Result<int>> task = sum(first, second);
  EXPECT_FALSE(task.step());
  first = true;
  EXPECT_FALSE(task.step());
  EXPECT_FALSE(task.step());
  second = true;
  EXPECT_TRUE(task.step());
  EXPECT_EQ(*task.result(), 111);
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
Task<Result<int>> deep(int levels, int& asked) {
  if (levels > 0) co_return *co_await deep(levels - 1, asked) + 1;
  co_await until([&] { return ++asked == 50; });
  co_return 0;
}

TEST(Task, AStepAsksTheInnermostPredicateOnce) {
  int asked = 0;
  Task<Result<int>> task = deep(100, asked);
  int steps = 1;
  while (!task.step()) ++steps;
  EXPECT_EQ(steps, 50);
  EXPECT_EQ(*task.result(), 100);
}

Task<Result<int>> holds(std::shared_ptr<int> held, const bool& go) {
  auto inner = [](std::shared_ptr<int> more, const bool& signal) -> Task<Result<int>> {
    co_await until([&] { return signal; });
    co_return *more;
  };
  co_return co_await inner(held, go);
}

TEST(Task, DestroyingAnUnfinishedTaskFreesTheWholeChain) {
  const auto held = std::make_shared<int>(1);
  const bool never = false;
  {
    Task<Result<int>> task = holds(held, never);
    EXPECT_FALSE(task.step());
    EXPECT_GT(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
  {
    const Task<Result<int>> never_stepped = holds(held, never);
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Task, MovesKeepTheirPlace) {
  bool go = false;
  Task<Result<int>> task = when(go, 3);
  EXPECT_FALSE(task.step());
  Task<Result<int>> moved = std::move(task);
  EXPECT_FALSE(task.valid());
  go = true;
  EXPECT_TRUE(moved.step());
  Task<Result<int>> assigned;
  assigned = std::move(moved);
  EXPECT_EQ(*assigned.result(), 3);
}

TEST(Task, MayBeSteppedAndFreedByAnotherThread) {
  bool go = false;
  for (int round = 0; round < 100; ++round) {
    go = false;
    auto task = std::make_unique<Task<Result<int>>>(when(go, round));
    EXPECT_FALSE(task->step());
    std::thread([&, mine = std::move(task)]() mutable {
      go = true;
      EXPECT_TRUE(mine->step());
      EXPECT_EQ(*mine->result(), round);
      mine.reset();
    }).join();
  }
}

// spec: H7 what a task throws is its result, wherever in the chain it is thrown
TEST(Task, AnExceptionIsItsResult) {
  const auto thrower = [](bool in_predicate) -> Task<> {
    if (!in_predicate) throw std::bad_alloc();
    co_await until([asked = 0]() mutable -> bool {
      return asked++ > 0 ? throw std::runtime_error("the predicate") : false;
    });
    co_return Status();
  };
  const auto outer = [&](bool in_predicate) -> Task<> {
    const Status status = co_await thrower(in_predicate);
    co_return status.with_context("outer");
  };
  Task<> at_once = outer(false);
  EXPECT_TRUE(at_once.step());
  EXPECT_EQ(at_once.peek().code(), Code::exhausted) << at_once.peek().message();
  Task<> later = outer(true);
  EXPECT_FALSE(later.step());
  EXPECT_TRUE(later.step());
  EXPECT_EQ(later.peek().code(), Code::internal);
  EXPECT_NE(later.peek().message().find("the predicate"), std::string::npos)
      << later.peek().message();
}

// spec: H7 the end of a thread passes through the task that it steps, which is over then
TEST(Task, TheEndOfItsThreadPassesThroughAndEndsIt) {
  const auto inner = [](bool in_predicate) -> Task<> {
    if (!in_predicate) pthread_exit(nullptr);
    co_await until([]() -> bool { pthread_exit(nullptr); });
    co_return Status();
  };
  const auto outer = [&](bool in_predicate) -> Task<> { co_return co_await inner(in_predicate); };
  for (const bool in_predicate : {false, true}) {
    Task<> task = outer(in_predicate);
    bool returned = false;
    std::thread([&] {
      task.step();
      returned = true;
    }).join();
    EXPECT_FALSE(returned);
    EXPECT_TRUE(task.step());
    EXPECT_EQ(task.peek().code(), Code::aborted) << task.peek().message();
  }
}

}  // namespace
}  // namespace muster
