// SPDX-License-Identifier: BSD-3-Clause
// Pipelining of small calls over links: visible only in the time that they take.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/collective/creation/group_creation.h"
#include "core/collective/queue/collective_queue.h"
#include "core/collective/testing/communicator_job.h"
#include "core/tunables/tunables.h"
#include "testing/limits.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

TimePoint in_a_minute() { return in(muster::testing::kMustHappen); }

// spec: F1 async_op; results and their order are those of calls one after another
TEST(Pipelining, BatchesOfSmallCallsCompleteInOrder) {
  for (Wire wire : testing::kWires) {
    constexpr int kRanks = 3;
    with_group(
        kRanks, wire,
        [](int rank, Communicator& group) {
          std::mt19937_64 random(testing::test_seed());  // the same on all ranks
          constexpr std::size_t kCalls = 60;
          std::vector<Values> in(kCalls), out(kCalls);
          std::vector<int> roots(kCalls, -1);
          const auto right = [&](std::size_t i) {
            const auto number = static_cast<int>(i);
            return out[i] ==
                   Values(in[i].size(), roots[i] >= 0 ? 100 * roots[i] + number : 300 + 3 * number);
          };
          std::vector<PendingRef> pending;
          std::array<std::atomic<int>, kCalls> called{}, early{};
          for (std::size_t i = 0; i < kCalls; ++i) {
            const std::size_t count = random() % 8 == 0 ? 6000 : 1 + random() % 40;
            in[i].assign(count, 100 * rank + static_cast<int>(i));
            out[i].assign(count, -1);
            if (random() % 3 == 0) {
              roots[i] = static_cast<int>(random() % kRanks);
              if (rank == roots[i]) out[i] = in[i];
              pending.push_back(group.start(broadcast(out[i], roots[i]), in_a_minute()));
            } else {
              pending.push_back(group.start(all_reduce(in[i], out[i]), in_a_minute()));
            }
            pending.back()->when_settled([&, i](const Status&) {
              called[i].fetch_add(1);
              for (std::size_t before = 0; before <= i; ++before)
                early[i].fetch_add(right(before) ? 0 : 1);
            });
          }
          for (std::size_t i = 0; i < kCalls; ++i) {
            const Status status = pending[i]->wait(in_a_minute());
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(right(i)) << "call " << i;
          }
          ASSERT_TRUE(group.close(in_a_minute()).ok());  // no callback is running any more
          for (std::size_t i = 0; i < kCalls; ++i) {
            EXPECT_EQ(called[i].load(), 1) << "call " << i;
            EXPECT_EQ(early[i].load(), 0)
                << "call " << i << " was told to be done before others that stood before it";
          }
        },
        false);
  }
}

// On three hosts of two ranks, calls of this size use several chunks and are small enough to be
// pipelined.
TEST(Pipelining, CallsInSeveralChunksAreSerialized) {
  constexpr int kRanks = 6;
  constexpr std::size_t kCalls = 20, kEach = 525;
  const Variable by_hosts("MUSTER_ALGORITHM", "reduce_scatter:hosts");
  with_group(kRanks, Wire::hosts, [](int rank, Communicator& group) {
    std::vector<Values> in(kCalls), out(kCalls);
    std::vector<PendingRef> pending;
    for (std::size_t i = 0; i < kCalls; ++i) {
      in[i].assign(kRanks * kEach, static_cast<std::int64_t>(1000 * i) + rank);
      out[i].assign(kEach, -1);
      Args args;
      args.op = Op::reduce_scatter;
      args.dtype = DType::int64;
      for (int to = 0; to < kRanks; ++to)
        args.inputs.push_back(
            std::as_bytes(std::span(in[i]).subspan(static_cast<std::size_t>(to) * kEach, kEach)));
      args.outputs = {bytes(out[i])};
      pending.push_back(group.start(std::move(args), in_a_minute()));
    }
    for (std::size_t i = 0; i < kCalls; ++i) {
      const Status status = pending[i]->wait(in_a_minute());
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(out[i], Values(kEach, static_cast<std::int64_t>(6000 * i) + 15)) << "call " << i;
    }
    ASSERT_TRUE(group.close(in_a_minute()).ok());
  });
}

// Every member is the root of some calls, and forwards the pieces of others in calls to which it
// contributes nothing.
TEST(Pipelining, CallsAlongTreesAreSerialized) {
  constexpr int kRanks = 7;
  constexpr std::size_t kCalls = 42;
  const Variable by_tree("MUSTER_ALGORITHM", "gather:tree,scatter:tree");
  for (Wire wire : {Wire::loopback, Wire::tcp}) {
    with_group(
        kRanks, wire,
        [](int rank, Communicator& group) {
          std::mt19937_64 random(testing::test_seed());  // the same on all ranks
          std::vector<Values> mine(kCalls), all(kCalls), expected(kCalls);
          std::vector<PendingRef> pending;
          const auto value = [](std::size_t call, int member) {
            return static_cast<std::int64_t>(100 * call) + member;
          };
          for (std::size_t i = 0; i < kCalls; ++i) {
            const int root = static_cast<int>(i % kRanks);
            const Op op = random() % 2 == 0 ? Op::gather : Op::scatter;
            const std::size_t count = random() % 40;
            for (int member = 0; member < kRanks; ++member)
              expected[i].insert(expected[i].end(), count, value(i, member));
            mine[i].assign(count, op == Op::gather ? value(i, rank) : -1);
            all[i] = op == Op::gather ? Values(kRanks * count, -1) : expected[i];
            pending.push_back(group.start(pieces(op, mine[i], all[i], root, group), in_a_minute()));
          }
          for (std::size_t i = 0; i < kCalls; ++i) {
            const Status status = pending[i]->wait(in_a_minute());
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_EQ(mine[i], Values(mine[i].size(), value(i, rank))) << "call " << i;
            if (rank == static_cast<int>(i % kRanks)) {
              EXPECT_EQ(all[i], expected[i]) << "call " << i;
            }
          }
          ASSERT_TRUE(group.close(in_a_minute()).ok());
        },
        false);
  }
}

// Batches of the maximum pipeline depth: the messages that they send to a member in one pass share
// a write.
TEST(Pipelining, MessagesOfCallsStartedTogetherShareWrites) {
  constexpr std::size_t kCalls = 8;
  for (const int ranks : {2, 4}) {
    with_group_alone(ranks, [&](int rank, Communicator& group) {
      const auto& fabric = group.channel().fabric();
      std::vector<Values> in(kCalls, Values{rank}), out(kCalls, Values{-1});
      const transport::Traffic before = fabric.traffic();
      std::vector<PendingRef> pending;
      for (std::size_t i = 0; i < kCalls; ++i)
        pending.push_back(group.start(all_reduce(in[i], out[i]), in_a_minute()));
      for (const auto& each : pending) ASSERT_TRUE(each->wait(in_a_minute()).ok());
      const transport::Traffic after = fabric.traffic();
      for (const Values& each : out) EXPECT_EQ(each, Values{ranks * (ranks - 1) / 2});
      EXPECT_GE(after.messages - before.messages, kCalls);
      EXPECT_LE(2 * (after.writes - before.writes), after.messages - before.messages);
    });
  }
}

TEST(Pipelining, CallsOnTheSameMemoryAreSerialized) {
  for (Wire wire : {Wire::loopback, Wire::tcp}) {
    with_group(
        2, wire,
        [](int, Communicator& group) {
          Values mine{1, 2, 3};
          Values other{5};
          std::vector<PendingRef> pending;
          for (int i = 0; i < 20; ++i) {
            pending.push_back(group.start(all_reduce(mine, mine), in_a_minute()));
            if (i % 5 == 0) pending.push_back(group.start(all_reduce(other, other), in_a_minute()));
          }
          for (const auto& each : pending) ASSERT_TRUE(each->wait(in_a_minute()).ok());
          EXPECT_EQ(mine, (Values{1 << 20, 2 << 20, 3 << 20}));
          EXPECT_EQ(other, (Values{5 << 4}));
        },
        false);
  }
}

// The root of a small broadcast completes its part at once. Notices that it received before still
// count.
// spec: F18 a refused call, where its member has said so before the other's begins
TEST(Pipelining, ACallRefusedOnAnotherRankFails) {
  for (Wire wire : {Wire::loopback, Wire::tcp}) {
    with_group(
        2, wire,
        [](int rank, Communicator& group) {
          Values values{1};
          if (rank == 1) {
            group.refuse(Op::broadcast);
            ASSERT_TRUE(group.send(0, 1, bytes(values), DType::int64, in_a_minute())
                            ->wait(in_a_minute())
                            .ok());
            // Until the other rank's failure arrives: it reads what is sent here.
            while (group.failure().ok()) group.channel().fabric().poll();
            return;
          }
          ASSERT_TRUE(group.receive(1, 1, bytes(values), DType::int64, in_a_minute())
                          ->wait(in_a_minute())
                          .ok());
          const Status status = group.run(broadcast(values, 0), in_a_minute());
          EXPECT_EQ(status.code(), Code::mismatch)
              << "behind the news of it: messages of one link keep their order";
          EXPECT_TRUE(contains(status.message(), "refused")) << status.message();
        },
        false);
  }
}

// One of many queued calls differs on one rank: all calls from that one on fail, with both calls
// named.
// spec: F18 different calls, queued behind others
TEST(Pipelining, ADifferentCallFailsItselfAndLaterCalls) {
  for (Wire wire : {Wire::loopback, Wire::shm}) {
    with_group(
        2, wire,
        [](int rank, Communicator& group) {
          std::vector<Values> in(6, Values{1}), out(6, Values{0, 0});
          std::vector<PendingRef> pending;
          for (std::size_t i = 0; i < in.size(); ++i) {
            if (i == 3 && rank == 1) {
              pending.push_back(group.start(broadcast(out[i], 0), in_a_minute()));
              continue;
            }
            out[i].resize(1);
            pending.push_back(group.start(all_reduce(in[i], out[i]), in_a_minute()));
          }
          std::vector<Status> ends;
          for (const auto& each : pending) ends.push_back(each->wait(in_a_minute()));
          EXPECT_EQ(ends[3].code(), Code::mismatch) << ends[3].message();
          EXPECT_TRUE(contains(ends[3].message(), "as number 4")) << ends[3].message();
          for (std::size_t i = 0; i < ends.size(); ++i) {
            if (i >= 3) {
              EXPECT_EQ(ends[i].code(), Code::mismatch) << i;
            } else if (ends[i].ok()) {
              EXPECT_EQ(out[i], Values{2});
            }
          }
        },
        false);
  }
}

// The only lock held while waiting for other ranks: the drive lock during an inline call. The bound
// is counted on a clock that only the wait advances.

using namespace communicator_test;

class StillClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  TimePoint time{seconds(1)};
};

/// A transfer without a reply.
struct Unanswered final : transport::Transfer {
  void end() {
    status_ = Status(Code::aborted, "taken back");
    done_.store(true);
  }
};

/// A group of two whose other member never arrives.
class LonelyChannel final : public transport::Channel {
 public:
  explicit LonelyChannel(transport::Fabric& fabric) : fabric_(fabric) {}
  std::uint32_t id() const override { return 1; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return 0; }
  transport::Fabric& fabric() override { return fabric_; }
  transport::TransferRef send(int, std::uint64_t, ConstBytes,
                              const transport::Fingerprint&) override {
    return std::make_shared<Unanswered>();
  }
  transport::TransferRef receive(int, std::uint64_t, MutableBytes, const transport::Fingerprint&,
                                 bool) override {
    return std::make_shared<Unanswered>();
  }
  void cancel(const transport::TransferRef& transfer) override {
    static_cast<Unanswered&>(*transfer).end();
  }
  void begin(const transport::Fingerprint&) override {}
  void compare(int, const transport::Fingerprint&) override {}
  Status failure() const override { return {}; }
  void fail(Status) override {}
  std::vector<int> awaited() const override { return {1}; }

 private:
  transport::Fabric& fabric_;
  const std::vector<int> members_{0, 1};
};

/// Waits in it always use up their time limit.
class LonelyFabric final : public transport::Fabric {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  const Clock& clock() const override { return clock_; }
  std::span<const int> hosts() const override { return hosts_; }
  shm::HostRegion* region() override { return nullptr; }
  transport::Channel& bootstrap() override { return channel_; }
  transport::Channel& agreements() override { return channel_; }
  Result<std::shared_ptr<transport::Channel>> open(std::uint32_t, std::vector<int>) override {
    return Status(Code::unsupported, "a fabric of a test");
  }
  std::uint32_t next_channel_id() const override { return 0; }
  bool poll() override { return false; }
  bool wait(const std::function<bool()>& done, TimePoint deadline) override {
    on_wait(deadline - clock_.time);
    clock_.time = deadline;
    return done();
  }
  void wake() override {}
  Status death_of(int) const override { return {}; }
  void declare_dead(int, Status) override {}
  void suspend_heartbeats(bool) override {}

  std::function<void(Duration limit)> on_wait;

 private:
  StillClock clock_;
  const std::vector<int> hosts_{0, 1};
  LonelyChannel channel_{*this};
};

class IdleDriver final : public Driver {
 public:
  explicit IdleDriver(std::shared_ptr<transport::Fabric> fabric) : fabric_(std::move(fabric)) {}
  std::shared_ptr<transport::Fabric> fabric() override { return fabric_; }
  void advance() override {}
  void check_deadlines(TimePoint) override {}
  bool busy() override { return false; }
  bool has_driver() override { return false; }
  TimePoint next_deadline() override { return TimePoint::max(); }
  bool drive_until(const std::function<bool()>&, TimePoint) override { return false; }
  void poll_between_compute() override {}
  void notify_progress_thread() override {}

 private:
  const std::shared_ptr<transport::Fabric> fabric_;
};

TEST(InlineCall, HoldsTheDriveLockForARoundTripAtMost) {
  const auto fabric = std::make_shared<LonelyFabric>();
  const GroupContext group{
      fabric, std::shared_ptr<transport::Channel>(fabric, &fabric->bootstrap()), "test"};
  CollectiveQueue queue(group, nullptr, {kNoSegment, Selection(Medium::network, 2).bounds()});
  IdleDriver driver(fabric);
  const auto is_held = [&queue] { return !queue.with_control([](Control&) {}); };
  std::vector<Duration> waits;
  fabric->on_wait = [&](Duration limit) {
    waits.push_back(limit);
    EXPECT_TRUE(is_held());
  };

  const Values in{1};
  Values out{0};
  const Args args = all_reduce(in, out);
  CallRecord record(TimePoint::max());
  InlineCall call(queue, args, record);
  ASSERT_TRUE(call.holds_lock());
  ASSERT_TRUE(call.check_notes());
  EXPECT_FALSE(call.run_bounded(driver)) << "the other member has not come";
  ASSERT_EQ(waits.size(), 1u) << "it waits once, then gives the lock back";
  EXPECT_LE(waits.front(), tunables().round_trip);
  EXPECT_TRUE(is_held());
  call.release_lock();
  EXPECT_FALSE(is_held());
}

TEST(InlineCall, ADeadlineEndsItsTurnEarlier) {
  const auto fabric = std::make_shared<LonelyFabric>();
  const GroupContext group{
      fabric, std::shared_ptr<transport::Channel>(fabric, &fabric->bootstrap()), "test"};
  CollectiveQueue queue(group, nullptr, {kNoSegment, Selection(Medium::network, 2).bounds()});
  IdleDriver driver(fabric);
  Duration waited{};
  fabric->on_wait = [&](Duration limit) { waited += limit; };
  const Values in{1};
  Values out{0};
  const Args args = all_reduce(in, out);
  CallRecord record(group.now() + std::chrono::microseconds(3));
  InlineCall call(queue, args, record);
  ASSERT_TRUE(call.holds_lock());
  EXPECT_FALSE(call.run_bounded(driver));
  EXPECT_EQ(waited, std::chrono::microseconds(3));
}

}  // namespace
}  // namespace muster::collective
