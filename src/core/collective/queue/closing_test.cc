// SPDX-License-Identifier: BSD-3-Clause
// Groups that not all members close, or not at the same time.
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/collective/region_group.h"
#include "core/collective/testing/communicator_job.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

/// Each job waits for as long as a group waits for those that do not close it: all wait at once.
void at_once(const std::vector<std::function<void()>>& jobs) {
  std::vector<std::thread> threads;
  for (const auto& job : jobs) threads.emplace_back(job);
  for (std::thread& thread : threads) thread.join();
}

/// Two groups of all ranks, over memory and over links. All ranks stay until all bodies have ended.
void with_two_groups(int ranks,
                     const std::function<void(int, Communicator&, Communicator&)>& body) {
  std::vector<std::function<void()>> jobs;
  for (const bool region : {false, true}) {
    jobs.emplace_back([=, &body] {
      SCOPED_TRACE(region ? "memory" : "links");
      run_ranks(ranks, Wire::region, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
        const Group one = make(fabric, all_of(ranks), "one", region);
        const Group other = make(fabric, all_of(ranks), "other", region);
        if (one == nullptr || other == nullptr) return;
        Values out(1);
        EXPECT_TRUE(one->run(all_reduce({1}, out), soon()).ok());
        EXPECT_TRUE(other->run(all_reduce({1}, out), soon()).ok());
        body(rank, *one, *other);
      });
    });
  }
  at_once(jobs);
}

// spec: B10 groups closed in another order on each member
TEST(Closing, InAnotherOrderOnEachMemberEndsWell) {
  with_two_groups(2, [](int rank, Communicator& one, Communicator& other) {
    const auto order = rank == 0 ? std::pair(&one, &other) : std::pair(&other, &one);
    for (Communicator* const group : {order.first, order.second}) {
      const Status closed = group->close(in(seconds(600)));
      EXPECT_TRUE(closed.ok()) << closed.message();
    }
  });
}

// spec: B10 a group that one member never closes
TEST(Closing, AGroupThatOneMemberNeverClosesHoldsUpNobody) {
  std::vector<std::function<void()>> jobs;
  for (const int lazy : {0, 1}) {
    jobs.emplace_back([lazy] {
      with_two_groups(3, [&](int rank, Communicator& one, Communicator& other) {
        if (rank != lazy) {
          const Status alone = one.close(in(seconds(600)));
          EXPECT_TRUE(alone.ok()) << alone.message();
        }
        const Status together = other.close(in(seconds(600)));
        EXPECT_TRUE(together.ok()) << together.message();
      });
    });
  }
  at_once(jobs);
}

// spec: B10 a member that works on learns that another has destroyed the group
TEST(Closing, AMemberThatGoesOnLearnsWhoHasLeft) {
  std::vector<std::function<void()>> jobs;
  for (const int leaver : {0, 1}) {
    for (const bool message : {false, true}) {
      jobs.emplace_back([leaver, message] {
        std::barrier closed(4);  // two ranks over memory, two over links
        with_two_groups(2, [&](int rank, Communicator& one, Communicator& other) {
          Values out(1);
          if (rank == leaver) {
            EXPECT_TRUE(one.send(rank == 0 ? 1 : 0, 7, bytes(out), DType::int64, soon())
                            ->wait(TimePoint::max())
                            .ok());
            const Status alone = one.close(in(seconds(600)));
            EXPECT_TRUE(alone.ok()) << alone.message();
          }
          closed.arrive_and_wait();
          if (rank != leaver) {
            // The leaver's message is still there.
            EXPECT_TRUE(one.receive(leaver, 7, bytes(out), DType::int64, soon())
                            ->wait(TimePoint::max())
                            .ok());
            const Status failed =
                message ? one.receive(leaver, 8, bytes(out), DType::int64, in(seconds(600)))
                              ->wait(TimePoint::max())
                        : one.run(all_reduce({1}, out), in(seconds(600)));
            EXPECT_EQ(failed.ranks(), std::vector<int>{leaver}) << failed.message();
            EXPECT_TRUE(contains(failed.message(), "rank " + std::to_string(leaver)) &&
                        (contains(failed.message(), "has destroyed group 'one'") ||
                         contains(failed.message(), "closes group 'one'")))
                << failed.message();
          }
          EXPECT_TRUE(other.run(all_reduce({1}, out), soon()).ok());
        });
      });
    }
  }
  at_once(jobs);
}

// spec: F18 a skipped last call is named by a member that closes after the first one has gone
TEST(Closing, AMemberThatClosesLateComparesItsCalls) {
  std::barrier closed(4);  // two ranks over memory, two over links
  with_two_groups(2, [&](int rank, Communicator& one, Communicator&) {
    Values value(1);
    // The root of a broadcast completes at once.
    if (rank == 0) {
      EXPECT_TRUE(one.run(broadcast(value, 0), soon()).ok());
      const Status alone = one.close(in(seconds(600)));
      EXPECT_TRUE(alone.ok()) << alone.message();
    }
    closed.arrive_and_wait();
    if (rank == 1) {
      const Status late = one.close(in(seconds(600)));
      EXPECT_EQ(late.code(), Code::mismatch) << late.message();
      EXPECT_EQ(late.ranks(), std::vector<int>{1}) << late.message();
    }
  });
}

/// The offset of the block that the next group of so many ranks gets.
std::uint64_t next_segment(transport::Fabric& fabric, int ranks) {
  const auto offset = fabric.region()->claim(RegionGroup::segment_bytes(ranks));
  EXPECT_TRUE(offset.ok()) << offset.status().message();
  fabric.region()->release(*offset);
  return *offset;
}

// spec: B10 the shared memory of a group that one member destroys alone is freed with its last
// member, however the others end it
TEST(Closing, TheLastMemberFreesTheMemoryOfAGroupThatOneDestroysAlone) {
  enum class End : std::uint8_t { closed, aborted, dropped };
  std::vector<std::function<void()>> jobs;
  for (const int leaver : {0, 1}) {
    for (const End end : {End::closed, End::aborted, End::dropped}) {
      jobs.emplace_back([leaver, end] {
        SCOPED_TRACE("leaver " + std::to_string(leaver) + ", the other end " +
                     std::to_string(static_cast<int>(end)));
        std::barrier all(2);
        run_ranks(2, Wire::region, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
          const std::uint64_t segment = rank != leaver ? next_segment(*fabric, 2) : 0;
          all.arrive_and_wait();
          Group group = make(fabric, all_of(2), "one");
          Values out(1);
          EXPECT_TRUE(group->run(all_reduce({1}, out), soon()).ok());
          if (rank == leaver) {
            const Status alone = group->close(in(seconds(600)));
            EXPECT_TRUE(alone.ok()) << alone.message();
          }
          all.arrive_and_wait();
          if (rank != leaver) {
            EXPECT_NE(next_segment(*fabric, 2), segment) << "freed while a member uses it";
            if (end == End::aborted) group->abort("for the test");
            if (end != End::dropped) static_cast<void>(group->close(in(seconds(600))));
            group.reset();
            EXPECT_EQ(next_segment(*fabric, 2), segment) << "kept without a member";
          }
          all.arrive_and_wait();
        });
      });
    }
  }
  at_once(jobs);
}

}  // namespace
}  // namespace muster::collective
