// SPDX-License-Identifier: BSD-3-Clause
// Which member of a call over shared memory waits for which, and for how long.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/region_group.h"
#include "core/collective/testing/region_job.h"
#include "testing/seed.h"

namespace muster::collective::region {
namespace {

// A member that sends and receives nothing may find all lines at once. The others still wait for
// its drained counter before they reuse memory that is read in place, even though none of it was
// for this member.
// spec: F12 an uneven exchange that leaves a member out
TEST(RegionGroup, AMemberWithNothingToReadReportsDrained) {
  constexpr std::size_t kBytes = 100'000;
  RegionJob job(3, {}, {}, false);
  std::vector<Buffer> given, taken;
  std::vector<Args> args(3);
  for (std::size_t member = 0; member < 3; ++member) {
    given.emplace_back(kBytes, true);
    taken.emplace_back(kBytes, true);
  }
  for (std::size_t member = 0; member < 3; ++member) {
    Args& call = args[member];
    call.op = Op::all_to_all;
    call.dtype = DType::uint8;
    for (std::size_t other = 0; other < 3; ++other) {
      const bool exchange = member != other && member < 2 && other < 2;
      call.inputs.push_back(given[member].bytes().first(exchange ? kBytes : 0));
      call.outputs.push_back(taken[member].bytes().first(exchange ? kBytes : 0));
    }
  }
  const transport::Fingerprint fingerprint = fingerprint_of(args[0], 1);
  auto first = job.groups[0]->run(args[0], fingerprint);
  auto second = job.groups[1]->run(args[1], fingerprint);
  EXPECT_FALSE(first.step());
  EXPECT_FALSE(second.step());
  if (!try_inline(*job.groups[2], args[2], fingerprint)) {
    auto third = job.groups[2]->run(args[2], fingerprint);
    ASSERT_TRUE(third.step());
    ASSERT_TRUE(third.result().ok());
  }
  EXPECT_FALSE(first.step());
  ASSERT_TRUE(second.step());
  ASSERT_TRUE(first.step());
  EXPECT_TRUE(first.result().ok());
  EXPECT_TRUE(second.result().ok());
}

// spec: F4 reduce of private memory: a member that only sends is done once its input is staged, if
// its core would help the root little
TEST(RegionGroup, SendersOfAReduceFinishBeforeTheRootBegins) {
  for (const int members : {2, 3}) {
    for (const bool oversubscribed : {false, true}) {
      Random random(testing::test_seed());
      RegionJob job(members, {}, {}, oversubscribed);
      CallShape shape;
      shape.op = Op::reduce;
      shape.dtype = DType::float32;
      shape.reduce = Reduce::sum;
      shape.count = 25'000;
      shape.root = 0;
      shape.arena = 0;
      for (std::uint64_t sequence = 1; sequence < 5; ++sequence) {
        SCOPED_TRACE(std::to_string(members) +
                     (oversubscribed ? " oversubscribed, call " : ", call ") +
                     std::to_string(sequence));
        TestCall call(shape, members, sequence, random);
        std::vector<Task<Status>> givers;
        for (int member = 1; member < members; ++member) {
          givers.push_back(job.run(member, call.args(member), call.fingerprint(member)));
          EXPECT_EQ(givers.back().step(), members == 2 || oversubscribed);
        }
        auto root = job.run(0, call.args(0), call.fingerprint(0));
        bool done = false;
        for (int pass = 0; pass < 100 && !done; ++pass) {
          done = root.step();
          for (auto& giver : givers) done = giver.step() && done;
        }
        ASSERT_TRUE(done);
        for (auto& giver : givers) EXPECT_TRUE(giver.result().ok()) << giver.result().message();
        for (int member = 0; member < members; ++member) EXPECT_TRUE(call.check(member));
      }
    }
  }
}

// A sender whose reader can read its memory leaves large slices in place, once the reader has said
// so, and waits for it. Otherwise they pass through windows; if those hold them all, the sender
// does not wait.
// spec: F8 scatter of private memory, copied once
TEST(RegionGroup, LargeSlicesAreReadInPlace) {
  // After this many bytes a task yields its thread once.
  const std::size_t kPause = tunables().work_quantum;
  for (const bool reads : {true, false}) {
    Random random(testing::test_seed());
    RegionJob job(3, {}, reads);
    CallShape shape;
    shape.op = Op::scatter;
    shape.dtype = DType::uint8;
    shape.count = direct_read_bytes(3) + 1;
    shape.arena = 0;
    for (std::uint64_t sequence = 1; sequence < 5; ++sequence) {
      SCOPED_TRACE(sequence);
      TestCall call(shape, 3, sequence, random);
      std::vector<Task<Status>> tasks;
      for (int member = 0; member < 3; ++member)
        tasks.push_back(job.run(member, call.args(member), call.fingerprint(member)));
      const bool stays = reads && sequence > 1, held = job.windows_hold(shape.count);
      EXPECT_EQ(tasks[0].step(), !stays && held);
      EXPECT_EQ(job.stays(0, sequence, 1), stays);
      if (stays || held) {
        for (int reader = 1; reader < 3; ++reader) {
          auto& task = tasks[RegionJob::at(reader)];
          ASSERT_TRUE(task.step() || (shape.count * sequence >= kPause && task.step()));
          EXPECT_TRUE(call.check(reader));
          if (stays && reader == 1) {
            EXPECT_FALSE(tasks[0].step()) << "another reader has not been there";
          }
        }
        ASSERT_TRUE(tasks[0].step());
        EXPECT_TRUE(call.check(0));
      } else {
        ASSERT_TRUE(finish(tasks));
        for (int member = 0; member < 3; ++member) EXPECT_TRUE(call.check(member)) << member;
      }
      for (auto& task : tasks) EXPECT_TRUE(task.result().ok()) << task.result().message();
    }
  }
}

// No member waits for one source while another's data is available: here the source that is first
// in order arrives last, and all others have been read by then.
TEST(RegionGroup, AvailableSourcesAreReadFirst) {
  for (const Op op : {Op::all_gather, Op::all_to_all, Op::gather}) {
    for (int missing = 1; missing < 4; ++missing) {
      SCOPED_TRACE(::testing::Message() << info(op).name << " without member " << missing);
      Random random(testing::test_seed());
      RegionJob job(4);
      CallShape shape;
      shape.op = op;
      shape.dtype = DType::uint8;
      shape.count = 40'000;
      TestCall call(shape, 4, 1, random);
      std::vector<Task<Status>> tasks;
      for (int member = 0; member < 4; ++member)
        tasks.push_back(job.run(member, call.args(member), call.fingerprint(member)));
      for (int pass = 0; pass < 3; ++pass) {
        for (int member = 3; member >= 0; --member) {
          if (member != missing) tasks[RegionJob::at(member)].step();
        }
      }
      const auto& outputs = call.args(0).outputs;
      for (int member = 1; member < 4; ++member) {
        if (member == missing) continue;
        const ConstBytes given = call.args(member).inputs[0];
        EXPECT_TRUE(std::equal(given.begin(), given.end(), outputs[RegionJob::at(member)].begin()))
            << "of member " << member;
      }
      ASSERT_TRUE(finish(tasks));
      for (int member = 0; member < 4; ++member) EXPECT_TRUE(call.check(member));
    }
  }
}

// On shared cores, each member stages a copy of small data and continues; otherwise data in the
// arena has been read when its owner returns.
TEST(RegionGroup, OversubscribedMembersDoNotWaitForArenaReaders) {
  for (const Op op : {Op::all_to_all, Op::reduce_scatter, Op::reduce}) {
    for (const bool oversubscribed : {true, false}) {
      for (const std::size_t count : {9'000, 900'000}) {
        Random random(1);
        RegionJob job(3, {}, {}, oversubscribed);
        CallShape shape;
        shape.op = op;
        shape.count = count;
        shape.arena = 1;
        TestCall call(shape, 3, 1, random);
        std::vector<Task<Status>> tasks;
        for (int member = 0; member < 3; ++member)
          tasks.push_back(job.run(member, call.args(member), call.fingerprint(member)));
        for (int step = 0; step < 50; ++step) {
          EXPECT_FALSE(tasks[0].step());
          if (op != Op::reduce) {
            EXPECT_FALSE(tasks[1].step());
          }
        }
        bool done = false;
        for (int step = 0; step < 50 && !done; ++step) done = tasks[2].step();
        EXPECT_EQ(done, oversubscribed && count < 10'000) << info(op).name << " of " << count;
        EXPECT_TRUE(finish(tasks));
      }
    }
  }
}

// A caller's thread drives a call until it cannot continue without the others; the rest continues
// as a task.
TEST(RegionGroup, AThreadDrivesItsCallForABoundedTime) {
  for (const bool oversubscribed : {false, true}) {
    SCOPED_TRACE(oversubscribed ? "on one core" : "a core each");
    Random random(testing::test_seed());
    RegionJob job(3, {}, {}, oversubscribed);
    const TimePoint never = TimePoint::max();
    TestCall sum({.op = Op::all_reduce, .dtype = DType::int32, .count = 64 * 1024, .arena = 0}, 3,
                 1, random);
    std::vector<Task<Status>> tasks;
    for (int member = 0; member < 3; ++member) {
      job.channels[RegionJob::at(member)]->begin(sum.fingerprint(member));
      tasks.push_back(
          job.groups[RegionJob::at(member)]->run(sum.args(member), sum.fingerprint(member)));
      EXPECT_FALSE(
          job.groups[RegionJob::at(member)]->inline_calls().drive_until(tasks.back(), never))
          << "others have shares to reduce";
    }
    ASSERT_TRUE(finish(tasks));
    for (int member = 0; member < 3; ++member) EXPECT_TRUE(sum.check(member));

    TestCall news(
        {.op = Op::broadcast, .dtype = DType::int32, .count = 64 * 1024, .root = 0, .arena = 0}, 3,
        2, random);
    for (int member = 0; member < 3; ++member) {
      job.channels[RegionJob::at(member)]->begin(news.fingerprint(member));
      Task<Status> task =
          job.groups[RegionJob::at(member)]->run(news.args(member), news.fingerprint(member));
      EXPECT_TRUE(job.groups[RegionJob::at(member)]->inline_calls().drive_until(task, never))
          << "all that member " << member << " needs is there";
      EXPECT_TRUE(news.check(member));
    }

    TestCall failing({.op = Op::all_reduce, .dtype = DType::int32, .count = 64 * 1024}, 3, 3,
                     random);
    job.channels[0]->begin(failing.fingerprint(0));
    Task<Status> task = job.groups[0]->run(failing.args(0), failing.fingerprint(0));
    EXPECT_FALSE(task.step());
    job.channels[1]->fail(Status(Code::aborted, "enough"));
    EXPECT_TRUE(job.groups[0]->inline_calls().drive_until(task, never));
    EXPECT_EQ(task.result().code(), Code::aborted);
  }
}

// Even a call that makes progress must stop for its deadline: deadlines are checked elsewhere,
// after the thread has released the call.
TEST(RegionGroup, AThreadThatProgressesChecksItsDeadline) {
  for (const bool oversubscribed : {false, true}) {
    Random random(testing::test_seed());
    RegionJob job(2, {}, {}, oversubscribed);
    // More than is moved between two checks of the clock, from the arena, without any wait.
    TestCall call({.op = Op::broadcast,
                   .dtype = DType::uint8,
                   .count = 10 * 1024 * 1024,
                   .root = 0,
                   .arena = 1},
                  2, 1, random);
    std::vector<Task<Status>> tasks;
    for (int member = 0; member < 2; ++member) {
      job.channels[RegionJob::at(member)]->begin(call.fingerprint(member));
      tasks.push_back(
          job.groups[RegionJob::at(member)]->run(call.args(member), call.fingerprint(member)));
    }
    EXPECT_FALSE(tasks[0].step());
    EXPECT_FALSE(job.groups[1]->inline_calls().drive_until(tasks[1], steady_clock().now()));
    ASSERT_TRUE(finish(tasks));
    for (int member = 0; member < 2; ++member) EXPECT_TRUE(call.check(member));
  }
}

// On shared cores, a small call that has already waited in vain for the others does not wait a
// second time.
TEST(RegionGroup, ALateCallIsPolledForOnlyOnce) {
  for (const bool oversubscribed : {false, true}) {
    Random random(testing::test_seed());
    RegionJob job(2, {}, {}, oversubscribed);
    TestCall call({.op = Op::all_reduce, .dtype = DType::int32, .count = 2}, 2, 1, random);
    job.channels[0]->begin(call.fingerprint(0));
    ASSERT_FALSE(try_inline(*job.groups[0], call.args(0), call.fingerprint(0)));
    Task<Status> first = job.groups[0]->run(call.args(0), call.fingerprint(0));
    job.channels[1]->begin(call.fingerprint(1));
    ASSERT_TRUE(try_inline(*job.groups[1], call.args(1), call.fingerprint(1)));
    EXPECT_EQ(job.groups[0]->inline_calls().drive_until(first, TimePoint::max()), !oversubscribed);
    ASSERT_TRUE(first.step());
    for (int member = 0; member < 2; ++member) EXPECT_TRUE(call.check(member));

    // A call that continues without `drive_until` leaves nothing behind for the next.
    TestCall late({.op = Op::all_reduce, .dtype = DType::int32, .count = 2}, 2, 2, random);
    job.channels[0]->begin(late.fingerprint(0));
    ASSERT_FALSE(try_inline(*job.groups[0], late.args(0), late.fingerprint(0)));
    first = job.groups[0]->run(late.args(0), late.fingerprint(0));
    job.channels[1]->begin(late.fingerprint(1));
    ASSERT_TRUE(try_inline(*job.groups[1], late.args(1), late.fingerprint(1)));
    ASSERT_TRUE(first.step());
    TestCall news(
        {.op = Op::broadcast, .dtype = DType::int32, .count = 64 * 1024, .root = 0, .arena = 0}, 2,
        3, random);
    for (int member = 0; member < 2; ++member) {
      RegionGroup& group = *job.groups[RegionJob::at(member)];
      job.channels[RegionJob::at(member)]->begin(news.fingerprint(member));
      ASSERT_FALSE(try_inline(group, news.args(member), news.fingerprint(member)))
          << "more than fits beside a line";
      Task<Status> task = group.run(news.args(member), news.fingerprint(member));
      EXPECT_TRUE(group.inline_calls().drive_until(task, TimePoint::max()));
    }
  }
}

TEST(RegionGroup, AMissingMemberOnTheSameCoreCountsMost) {
  const auto among = [](const std::set<int>& missing, const std::set<int>& elsewhere) {
    return missing_among(
        1, 4, [&](int member) { return missing.contains(member); },
        [&](int member) { return elsewhere.contains(member); });
  };
  EXPECT_EQ(among({}, {1, 2}), MissingPeers::none);
  EXPECT_EQ(among({0, 4}, {}), MissingPeers::none) << "others than those that are waited for";
  EXPECT_EQ(among({1, 3}, {1, 2, 3}), MissingPeers::elsewhere);
  EXPECT_EQ(among({1, 3}, {1, 2}), MissingPeers::here);
  EXPECT_EQ(among({1, 3}, {3}), MissingPeers::here);
}

}  // namespace
}  // namespace muster::collective::region
