// SPDX-License-Identifier: BSD-3-Clause
// Messages between two members of a communicator.
#include <barrier>
#include <future>
#include <latch>
#include <thread>

#include "core/collective/testing/communicator_job.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

// spec: E1 messages with one tag between two ranks keep their order; different tags may overtake
TEST(Messages, KeepTheirOrderWithinATag) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      constexpr int kMessages = 20;
      std::vector<Values> data(2 * kMessages, Values(3000));  // some are above the eager threshold
      std::vector<PendingRef> pending;
      for (int i = 0; i < kMessages; ++i) {
        for (int tag : {5, 6}) {
          Values& value = data[static_cast<std::size_t>(2 * i + tag - 5)];
          if (i % 2 == 0) value.resize(2);
          if (rank == 0) {
            value[0] = i * 10 + tag;
            pending.push_back(
                group.send(1, static_cast<std::uint64_t>(tag), bytes(value), DType::int64, soon()));
          }
        }
      }
      for (int tag : {6, 5}) {
        for (int i = 0; rank == 1 && i < kMessages; ++i) {
          Values& value = data[static_cast<std::size_t>(2 * i + tag - 5)];
          const auto receive =
              group.receive(0, static_cast<std::uint64_t>(tag), bytes(value), DType::int64, soon());
          const Status status = receive->wait(soon());
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_EQ(value[0], i * 10 + tag);
          ASSERT_EQ(receive->source(), 0);
          ASSERT_EQ(receive->bytes(), value.size() * 8);
        }
      }
      for (const auto& send : pending) {
        ASSERT_TRUE(send->wait(soon()).ok());
        ASSERT_TRUE(send->done());
      }
    });
  }
}

// spec: E2 recv with no source takes from any rank and returns the sender's rank
TEST(Messages, AreTakenFromAnyMember) {
  for (Wire wire : testing::kWires) {
    with_group(4, wire, [](int rank, Communicator& group) {
      Values value{rank};
      if (rank != 2) {
        ASSERT_TRUE(group.send(2, 9, bytes(value), DType::int64, soon())->wait(soon()).ok());
        return;
      }
      Values seen;
      for (int i = 0; i < 3; ++i) {
        const auto receive =
            group.receive(transport::kAnyMember, 9, bytes(value), DType::int64, soon());
        const Status status = receive->wait(soon());
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(receive->source(), value[0]);
        seen.push_back(value[0]);
      }
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, (Values{0, 1, 3}));
    });
  }
}

// spec: E4 a receive whose tensor does not match the message (bytes, dtype) fails on the receiver,
// naming both
TEST(Messages, ThatDoNotFitFailAtTheReceiverAlone) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values value(4);
      std::vector<float> floats(8);
      if (rank == 0) {
        EXPECT_TRUE(group.send(1, 1, bytes(value), DType::int64, soon())->wait(soon()).ok());
        EXPECT_TRUE(group.send(1, 2, bytes(value), DType::int64, soon())->wait(soon()).ok());
      } else {
        const Status size =
            group.receive(0, 1, bytes(value).first(16), DType::int64, soon())->wait(soon());
        EXPECT_EQ(size.code(), Code::mismatch);
        EXPECT_TRUE(contains(size.message(), "16 bytes") && contains(size.message(), "32 bytes"))
            << size.message();
        const Status type =
            group.receive(0, 2, std::as_writable_bytes(std::span(floats)), DType::float32, soon())
                ->wait(soon());
        EXPECT_EQ(type.code(), Code::mismatch);
        EXPECT_TRUE(contains(type.message(), "float32") && contains(type.message(), "int64"))
            << type.message();
      }
      Values sum(1);
      EXPECT_TRUE(group.run(all_reduce({rank + 1}, sum), soon()).ok()) << "the group goes on";
      EXPECT_EQ(sum[0], 3);
    });
  }
}

// spec: E5 any mix, never deadlocks: both sides send a large message before they receive
TEST(Messages, LargeOnesCrossWithoutDeadlock) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      const Values mine(200'000, rank + 7);
      Values theirs(mine.size());
      const auto send = group.send(1 - rank, 3, bytes(mine), DType::int64, soon());
      const auto receive = group.receive(1 - rank, 3, bytes(theirs), DType::int64, soon());
      EXPECT_TRUE(send->wait(soon()).ok());
      EXPECT_TRUE(receive->wait(soon()).ok());
      EXPECT_EQ(theirs, Values(mine.size(), 1 - rank + 7));
    });
  }
}

TEST(Messages, PastTheirDeadlineNameThePeerOnly) {
  with_group(2, Wire::loopback, [](int rank, Communicator& group) {
    if (rank == 0) {
      Values value(4);
      const Status late = group.receive(1, 1, bytes(value), DType::int64, in(milliseconds(30)))
                              ->wait(TimePoint::max());
      EXPECT_EQ(late.code(), Code::timed_out);
      EXPECT_EQ(late.ranks(), std::vector<int>{1});
      EXPECT_TRUE(contains(late.message(), "from rank 1") &&
                  contains(late.message(), "group 'test'"))
          << late.message();
      const Values large(200'000);
      EXPECT_EQ(group.send(1, 1, bytes(large), DType::int64, in(milliseconds(30)))
                    ->wait(TimePoint::max())
                    .code(),
                Code::timed_out);
    }
    Values sum(1);
    EXPECT_TRUE(group.run(all_reduce({rank + 1}, sum), soon()).ok());
    EXPECT_EQ(sum[0], 3);
  });
}

Args message(Op op, int peer, std::uint64_t tag, Values& values) {
  Args args;
  args.op = op;
  args.dtype = DType::int64;
  args.root = peer;
  args.tag = tag;
  if (op == Op::send) args.inputs = {bytes(values)};
  if (op == Op::recv) args.outputs = {bytes(values)};
  return args;
}

// spec: E1 blocking send and recv; their order among posted ones; concurrently with a started
// collective
TEST(Messages, BlockingOnesKeepTheirOrder) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values mine{rank}, sum{0};
      const auto started = group.start(all_reduce(mine, sum), soon());
      for (const std::size_t count : {std::size_t{1}, std::size_t{2000}, std::size_t{200'000}}) {
        Values first(count, 1), second(count, 2), third(count, 3), got(count);
        if (rank == 0) {
          const auto before = group.send(1, 8, bytes(first), DType::int64, soon());
          const auto on_its_way = group.send(1, 8, bytes(second), DType::int64, soon());
          const Status sent = group.run(message(Op::send, 1, 8, third), soon());
          ASSERT_TRUE(sent.ok()) << sent.message();
          ASSERT_TRUE(before->wait(soon()).ok() && on_its_way->wait(soon()).ok());
        } else {
          const auto posted = group.receive(0, 8, bytes(got), DType::int64, soon());
          Values next(count), last(count);
          for (Values* each : {&next, &last}) {
            const Status taken = group.run(message(Op::recv, 0, 8, *each), soon());
            ASSERT_TRUE(taken.ok()) << taken.message();
          }
          ASSERT_TRUE(posted->wait(soon()).ok());
          EXPECT_TRUE(got == first && next == second && last == third) << count;
        }
      }
      ASSERT_TRUE(started->wait(soon()).ok());
      EXPECT_EQ(sum, Values{1});
    });
  }
}

// spec: E4 E1 blocking messages that do not fit, or have no peer, or an invalid one
TEST(Messages, BlockingOnesFailLikeTheOthers) {
  for (Wire wire : {Wire::loopback, Wire::tcp, Wire::region}) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values value(2), large(200'000);
      if (rank == 0) {
        EXPECT_TRUE(group.run(message(Op::send, 1, 1, value), soon()).ok());
        const Status late = group.run(message(Op::recv, 1, 2, value), in(milliseconds(30)));
        EXPECT_EQ(late.code(), Code::timed_out);
        EXPECT_EQ(late.ranks(), std::vector<int>{1});
        EXPECT_TRUE(contains(late.message(), "recv of 2 elements of int64 from rank 1 with tag 2"))
            << late.message();
        EXPECT_EQ(group.run(message(Op::send, 1, 3, large), in(milliseconds(30))).code(),
                  Code::timed_out);
      } else {
        const Status size = group.run(message(Op::recv, 0, 1, large), soon());
        EXPECT_EQ(size.code(), Code::mismatch);
        EXPECT_TRUE(contains(size.message(), "16 bytes")) << size.message();
      }
      EXPECT_EQ(group.run(message(Op::recv, 2, 0, value), soon()).code(), Code::invalid_argument);
      Args empty;
      empty.op = Op::send;
      empty.root = 1 - rank;
      EXPECT_TRUE(contains(group.run(empty, soon()).message(),
                           "needs one slice, an input, and got 0 inputs"));
      EXPECT_EQ(group.run(message(Op::send, 1 - rank, ~0ull, value), soon()).code(),
                Code::invalid_argument);
      Values sum(1);
      EXPECT_TRUE(group.run(all_reduce({rank + 1}, sum), soon()).ok()) << "the group goes on";
      EXPECT_EQ(sum[0], 3);
    });
  }
}

TEST(Messages, ThatAreOpenWhenAGroupClosesAreCancelled) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      Values value(1);
      std::latch posted(1), closed(1);
      const std::function<void()> between = [&] {  // posted, but not tracked yet
        posted.count_down();
        closed.wait();
      };
      CallRecord record(soon());
      record.when_started = &between;
      Status taken;
      std::thread other([&] { taken = group.run(message(Op::recv, 1 - rank, 4, value), record); });
      posted.wait();
      EXPECT_TRUE(group.close(soon()).ok());
      closed.count_down();
      other.join();
      EXPECT_EQ(taken.code(), Code::aborted);
      EXPECT_TRUE(contains(taken.message(), "its group has been closed")) << taken.message();
    });
  }
}

TEST(Messages, WrongPeersAndTagsAreRefused) {
  with_group(2, Wire::loopback, [](int, Communicator& group) {
    Values value(1);
    EXPECT_EQ(group.send(2, 0, bytes(value), DType::int64, soon())->wait(soon()).code(),
              Code::invalid_argument);
    EXPECT_EQ(group.send(transport::kAnyMember, 0, bytes(value), DType::int64, soon())
                  ->wait(soon())
                  .code(),
              Code::invalid_argument);
    EXPECT_EQ(group.send(0, ~0ull, bytes(value), DType::int64, soon())->wait(soon()).code(),
              Code::invalid_argument);
    EXPECT_EQ(group.receive(0, 0, bytes(value).first(3), DType::int64, soon())->wait(soon()).code(),
              Code::invalid_argument);
  });
}

// spec: E3 get_future: the callback runs once, without a waiting thread
TEST(Messages, CallBackWithoutAWait) {
  for (Wire wire : testing::kWires) {
    with_group(2, wire, [](int rank, Communicator& group) {
      std::atomic<int> called{0};
      Values values(50'000, rank);
      PendingRef pending = rank == 0 ? group.send(1, 4, bytes(values), DType::int64, soon())
                                     : group.receive(0, 4, bytes(values), DType::int64, soon());
      pending->when_done([&](const Status& status) { called += status.ok() ? 1 : 100; });
      while (called.load() == 0) std::this_thread::yield();
      EXPECT_EQ(called.load(), 1);
      EXPECT_TRUE(pending->done());
      pending->when_settled([&](const Status&) { called += 1; });
      EXPECT_EQ(called.load(), 2) << "at once where it is done already";
      pending->when_done([&](const Status&) { called += 1; });
      while (called.load() < 3) std::this_thread::yield();
    });
  }
}

void set_when_done(std::promise<void>& called, const PendingRef& pending) {
  pending->when_done([&called](const Status&) { called.set_value(); });
}

bool is_set_in_time(std::promise<void>& called) {
  return called.get_future().wait_for(muster::testing::kMustHappen) == std::future_status::ready;
}

// spec: E3 get_future: the callback runs while the progress thread drives another group, whose
// message may never come
TEST(Messages, CallBackWhileAnotherGroupWaits) {
  for (Wire wire : testing::kWires) {
    std::barrier step(2);
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group one = make(fabric, all_of(2), "one"), two = make(fabric, all_of(2), "two");
      Values first(10, rank), second(10, rank), open(10, rank);
      if (rank == 0) {
        std::promise<void> first_done, second_done;
        const auto pending =
            one->receive(1, 2, bytes(open), DType::int64, soon() + muster::testing::kMustHappen);
        set_when_done(first_done, one->receive(1, 1, bytes(first), DType::int64, soon()));
        step.arrive_and_wait();
        EXPECT_TRUE(is_set_in_time(first_done));
        // The progress thread drives `one` by now, and goes on with it.
        set_when_done(second_done, two->receive(1, 1, bytes(second), DType::int64, soon()));
        step.arrive_and_wait();
        EXPECT_TRUE(is_set_in_time(second_done));
        EXPECT_FALSE(pending->done());
        step.arrive_and_wait();
        EXPECT_TRUE(pending->wait(soon()).ok());
      } else {
        step.arrive_and_wait();
        EXPECT_TRUE(one->send(0, 1, bytes(first), DType::int64, soon())->wait(soon()).ok());
        step.arrive_and_wait();
        EXPECT_TRUE(two->send(0, 1, bytes(second), DType::int64, soon())->wait(soon()).ok());
        step.arrive_and_wait();
        EXPECT_TRUE(one->send(0, 2, bytes(open), DType::int64, soon())->wait(soon()).ok());
      }
    });
  }
}

}  // namespace
}  // namespace muster::collective
