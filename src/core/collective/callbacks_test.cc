// SPDX-License-Identifier: BSD-3-Clause
// Callbacks of started calls: user code that waits, sleeps, throws.
#include <future>
#include <stdexcept>

#include "core/collective/testing/communicator_job.h"
#include "testing/limits.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

void join(std::promise<void>& over) {
  ASSERT_EQ(over.get_future().wait_for(muster::testing::kMustHappen), std::future_status::ready);
}

/// A chain of `depth` calls, each started and awaited by the callback of the one before, on
/// `groups` in turn.
void nest(std::vector<Group> groups, int depth, const std::function<void(bool right)>& then) {
  const auto in = std::make_shared<Values>(100, groups.front()->rank() + 1),
             out = std::make_shared<Values>(100);
  auto pending =
      groups[static_cast<std::size_t>(depth) % groups.size()]->start(all_reduce(*in, *out), soon());
  pending->when_done([=](const Status& status) {
    const bool right = status.ok() && *out == Values(100, 3) && !in->empty();
    if (depth == 1) return then(right);
    auto inner = std::make_shared<std::promise<bool>>();
    nest(groups, depth - 1, [inner](bool each) { inner->set_value(each); });
    then(inner->get_future().get() && right);
  });
}

// spec: F1 async_op: a callback may wait for calls whose callbacks wait for calls
TEST(Callbacks, WaitForCallsWhoseCallbacksWait) {
  for (Wire wire : testing::kWires) {
    run_ranks(2, wire, [](int, std::shared_ptr<transport::Fabric> fabric) {
      const std::vector<Group> groups{make(fabric, all_of(2), "one"),
                                      make(fabric, all_of(2), "two")};
      for (std::size_t count = 1; count <= 2; ++count) {
        for (int depth = 2; depth <= 4; ++depth) {
          std::promise<bool> right;
          nest({groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(count)}, depth,
               [&](bool each) { right.set_value(each); });
          EXPECT_TRUE(right.get_future().get());
        }
      }
    });
  }
}

// spec: F1 async_op: an exception in a callback neither ends the process nor delays later calls
TEST(Callbacks, MayThrow) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values in(10, rank + 1);
      Values out(10), again(10);
      std::promise<void> other;
      const auto pending = group.start(all_reduce(in, out), soon());
      pending->when_done(
          [](const Status&) { throw std::runtime_error("from a callback of the test's"); });
      pending->when_done([&](const Status&) { other.set_value(); });
      EXPECT_TRUE(pending->wait(soon()).ok());
      join(other);
      EXPECT_TRUE(group.run(all_reduce(in, again), soon()).ok());
      EXPECT_EQ(again, Values(10, 3));
    });
  }
}

// spec: E3 timeouts: a deadline fires whatever callbacks do, for threads that wait, poll, or do
// nothing
TEST(Callbacks, ThatNeverReturnDoNotDelayTimeouts) {
  for (Wire wire : testing::kWires) {
    std::promise<void> end;
    const std::shared_future<void> ended = end.get_future().share();
    std::atomic<int> left{0};
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group held = make(fabric, all_of(2), "held");
      const Group polled = make(fabric, all_of(2), "polled"),
                  watched = make(fabric, all_of(2), "watched");
      const Values in(10, 1);
      Values out(10), never(10), neither(10);
      std::promise<void> inside;
      ++left;
      held->start(all_reduce(in, out), soon())->when_done([&](const Status&) {
        inside.set_value();
        ended.wait();
        --left;
      });
      join(inside);
      if (rank == 0) {
        const auto limit = communicator_test::in(milliseconds(200));
        std::promise<Status> told;
        watched->start(all_reduce(in, neither), limit)->when_done([&](const Status& status) {
          told.set_value(status);
        });
        const auto pending = polled->start(all_reduce(in, never), limit);
        while (!pending->done()) std::this_thread::yield();
        EXPECT_EQ(pending->wait(soon()).code(), Code::timed_out);
        EXPECT_EQ(told.get_future().get().code(), Code::timed_out);
      } else {
        while (polled->failure().ok() || watched->failure().ok()) std::this_thread::yield();
      }
      if (rank == 0) end.set_value();
      ended.wait();
      while (left.load() > 0) std::this_thread::yield();
    });
  }
}

// spec: E3 timeouts: a thread that has promised to drive its calls, and only polls, sees its own
// deadline
TEST(Callbacks, APollingThreadChecksItsOwnDeadline) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      if (rank == 0) {
        const auto in_short = [] { return communicator_test::in(milliseconds(200)); };
        const Values in(10, 1);
        Values out(10);
        const auto driving = group.manual_progress();
        const auto pending = group.start(all_reduce(in, out), in_short());
        while (!pending->done()) std::this_thread::yield();
        EXPECT_EQ(pending->wait(soon()).code(), Code::timed_out);
        const auto message = group.receive(1, 3, bytes(out), DType::int64, in_short());
        while (!message->done()) std::this_thread::yield();
        EXPECT_FALSE(message->wait(soon()).ok());
      } else {
        while (group.failure().ok()) std::this_thread::yield();
      }
    });
  }
}

}  // namespace
}  // namespace muster::collective
